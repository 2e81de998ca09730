"""Ceilings below what namespaces' labels demand."""

import dataclasses

import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding_kinds import Kind
from agent.operate.kubectl import ceilings
from agent.operate.kubectl.findings import Finding
from agent.operate.kubectl.node_status import NodeStatus

NAMESPACES = {"web": "strict", "shop": "enforce", "dev": "audit", "open": "off"}


def status(mode: str, by: str = "--max-mode", *found: Finding) -> NodeStatus:
    return NodeStatus("a", max_mode=mode, max_mode_from=by, findings=found)


@pytest.mark.parametrize(
    ("mode", "by", "namespaces", "kind", "sentence"),
    [
        (
            *("audit", "--max-mode", NAMESPACES, kinds.MODE_LIMITED),
            "Modes are limited to audit by --max-mode; labelled above that: shop (enforce), web "
            "(strict).",
        ),
        (
            *("enforce", "", NAMESPACES, kinds.MODE_LIMITED),
            "Modes are limited to enforce; labelled above that: web (strict).",
        ),
        (
            *("off", "the node's label", {}, kinds.OFF),
            "podgate is off by the node's label: all pods of this node are open. 'kubectl podgate "
            "on NODE' undoes it.",
        ),
        (
            *("off", "the label", {"dev": "audit", "open": "off"}, kinds.OFF),
            "podgate is off by the label: all pods of this node are open; labelled above that: dev "
            "(audit). 'kubectl podgate on' undoes it.",
        ),
    ],
)
def test_ceiling_is_a_finding_of_its_node(
    mode: str, by: str, namespaces: dict[str, str], kind: Kind, sentence: str
) -> None:
    own = Finding("a", kind.severity, kind.name, "node", sentence, kind.remedy, kind.command)
    assert ceilings.with_findings(status(mode, by), namespaces).findings == (own,)


@pytest.mark.parametrize(
    ("mode", "namespaces"), [("strict", NAMESPACES), ("audit", {"x": "audit"}), ("?", NAMESPACES)]
)
def test_ceiling_that_limits_nothing_is_none(mode: str, namespaces: dict[str, str]) -> None:
    assert ceilings.with_findings(status(mode), namespaces) == status(mode)


def test_finding_replaces_those_of_the_agent_and_has_their_pods() -> None:
    def of_agent(kind: Kind, subject: str, *pods: str) -> Finding:
        return Finding("a", kind.severity, kind.name, subject, "It is so.", pods=pods)

    worse = dataclasses.replace(of_agent(kinds.GATE_FAILED, "pod shop/db"), severity="open")
    other = of_agent(kinds.MODE_LIMITED, "label x", "shop/other")
    found = ceilings.with_findings(
        status(
            *("audit", ""),
            other,
            of_agent(kinds.MODE_LIMITED, "node", "shop/web", "shop/db"),
            of_agent(kinds.OFF, "node", "shop/db", "shop/api"),
            worse,
        ),
        NAMESPACES,
    )
    first, own, last = found.findings
    assert (first, last) == (worse, other)
    assert own.sentence.startswith("Modes are limited to audit; labelled above that: ")
    assert own.pods == ("shop/web", "shop/db", "shop/api")
