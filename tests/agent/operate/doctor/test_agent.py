"""Findings about the agent, by its report."""

import pathlib
from typing import Any

import msgspec
import pytest

from agent import VERSION
from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding
from agent.admin.finding_kinds import Severity
from agent.admin.report import PolicyStatus, RulesReport
from agent.operate.doctor import agent
from agent.operate.doctor.results import Passed
from agent.operate.pinned import findings as pinned_findings
from agent.operate.pinned import status as pinned_status
from agent.pods import off_marks
from agent.policy import host_agents
from agent.policy.default_rules import NODE_DNS
from tests.agent.operate.cli.reports import PINNED
from tests.agent.operate.cli.stub_agent import StubAgent
from tests.agent.operate.kubectl.reporting import REPORT

RULES = RulesReport(sources=[], policies=[], problems=[])
DNS_RULES = RulesReport(
    sources=[], policies=[PolicyStatus(name=NODE_DNS, source="", pods=[], rules=[])], problems=[]
)


def test_agent_without_a_finding_is_one_line() -> None:
    assert list(agent.of_report(REPORT)) == [
        Passed("agent", "Agent running, pid 1, all pods synced.")
    ]


def test_dns_rule_is_needed_where_something_may_be_enforced() -> None:
    limited = msgspec.structs.replace(REPORT, max_mode="audit")
    assert isinstance(agent.dns_rule(REPORT, RULES), Finding)
    assert isinstance(agent.dns_rule(REPORT, DNS_RULES), Passed)
    assert isinstance(agent.dns_rule(limited, RULES), Passed)


@pytest.mark.parametrize(
    ("components", "texts"),
    [
        ({"nri": True}, ["podgate-cni is not needed"]),
        ({}, ["NRI is not used"]),
        # The agent's findings have the reason.
        ({"nri": False}, []),
    ],
)
def test_way_to_gates_before_a_pod_starts_is_named(
    components: dict[str, bool], texts: list[str]
) -> None:
    report = msgspec.structs.replace(REPORT, components=components)
    found = list(agent.nri(report))
    assert len(found) == len(texts)
    for result, text in zip(found, texts, strict=True):
        assert isinstance(result, Passed)
        assert text in result.text


def test_dns_rule_is_named_as_the_default_rules_name_it() -> None:
    names = {f"podgate:{one.group}/{one.name}" for one in host_agents.TABLE}
    assert NODE_DNS in names


async def found(directory: pathlib.Path, *, is_in_cluster: bool = False) -> list[Finding]:
    results = await agent.check(directory, directory, is_in_cluster=is_in_cluster)
    return [one for one in results if isinstance(one, Finding)]


async def test_node_that_is_switched_off_is_open(tmp_path: pathlib.Path) -> None:
    assert [one.kind for one in await found(tmp_path)] == [kinds.AGENT_MISSING.name]
    off_marks.file(tmp_path).touch()
    off, silent = await found(tmp_path)
    assert (off.kind, off.severity) == (kinds.OFF.name, Severity.OPEN)
    assert "all pods of this node are open" in off.sentence
    assert silent.severity == Severity.DEGRADED


async def checked(
    directory: pathlib.Path, answers: dict[str, bytes], *, is_in_cluster: bool = False
) -> list[Finding]:
    """What doctor finds with an agent that answers."""
    with StubAgent(directory, {"/version": VERSION.encode(), **answers}):
        return await found(directory, is_in_cluster=is_in_cluster)


async def test_agent_of_another_version_is_named_and_its_report_is_not_used(
    tmp_path: pathlib.Path,
) -> None:
    other = msgspec.structs.replace(REPORT, version="9.0.0", is_synced=False)
    (finding,) = await checked(tmp_path, {"/status": msgspec.json.encode(other)})
    assert finding.kind == kinds.AGENT_UNREADABLE.name
    assert finding.sentence == f"The agent has version 9.0.0, this command {VERSION}."
    assert "upgrade" in finding.remedy


async def test_answer_that_is_no_report_is_another_versions(tmp_path: pathlib.Path) -> None:
    (finding,) = await checked(tmp_path, {"/status": b"no JSON"})
    assert finding.kind == kinds.AGENT_UNREADABLE.name
    assert "cannot be read" in finding.sentence
    assert "upgrade" in finding.remedy


async def test_agent_that_does_not_serve_its_report_is_a_warning(tmp_path: pathlib.Path) -> None:
    (finding,) = await checked(tmp_path, {})
    assert finding.kind == kinds.AGENT_UNREADABLE.name
    assert "does not serve /status" in finding.sentence


@pytest.mark.parametrize("is_in_cluster", [False, True])
async def test_dns_rule_is_checked_in_a_cluster(
    tmp_path: pathlib.Path, *, is_in_cluster: bool
) -> None:
    answers = {"/status": msgspec.json.encode(REPORT), "/rules": msgspec.json.encode(RULES)}
    results = await checked(tmp_path, answers, is_in_cluster=is_in_cluster)
    assert [one.kind for one in results] == [kinds.DNS_RULE_MISSING.name] * is_in_cluster


async def without_agent(
    monkeypatch: pytest.MonkeyPatch, directory: pathlib.Path, **pinned: Any
) -> list[Finding]:
    """What doctor finds where gates are in force, and no agent runs."""
    status = msgspec.structs.replace(PINNED, **pinned)
    status = msgspec.structs.replace(status, findings=pinned_findings.find(status))
    monkeypatch.setattr(pinned_status, "read", lambda *_, **__: status)
    return await found(directory, is_in_cluster=True)


async def test_findings_of_the_pins_are_those_of_doctor(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await without_agent(monkeypatch, tmp_path) == PINNED.findings
    by_kind = {one.kind: one for one in PINNED.findings}
    dead = by_kind[kinds.AGENT_DEAD.name]
    # Two gates, of which one is detached.
    assert dead.sentence == "No agent responds, and 1 gate is in force, heartbeat 40 s old."
    assert by_kind[kinds.GATE_DETACHED.name].severity == Severity.OPEN
    assert "in 23 h 59 min" in by_kind[kinds.GATES_OPEN_SOON.name].sentence


async def test_no_agent_and_no_gate_is_degraded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare: dict[str, Any] = {"gates": [], "hooks": [], "exposures": []}
    (finding,) = await without_agent(monkeypatch, tmp_path, **bare)
    assert (finding.kind, finding.severity) == (kinds.AGENT_MISSING.name, Severity.DEGRADED)
