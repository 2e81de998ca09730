"""What a node's agent reports, also one of another version."""

import json
from typing import Any

import pytest

from agent import VERSION, labels
from agent.admin import finding_kinds as kinds
from agent.operate.kubectl import findings, node_status
from agent.operate.kubectl.cluster import Cluster, NodeAnswer
from agent.operate.kubectl.node_status import NodeStatus, PodInForce
from tests.agent.operate.kubectl.standin import KubectlStandin

Json = dict[str, Any]


def pod(name: str, reason: str = "", status: str = "True", **changes: Any) -> Json:
    own = {"type": labels.ISOLATION_READY, "status": status, "reason": reason, "message": "So."}
    conditions = [{"type": "Other", "status": "True", "reason": "Off"}, *([own] if reason else [])]
    return {
        "namespace": "shop",
        "name": name,
        "mode": "enforce",
        "conditions": conditions,
    } | changes


def read(report: Any, **answer: Any) -> NodeStatus:
    return node_status.read(NodeAnswer("a", json.dumps(report), **answer))


def test_report_is_read_whole() -> None:
    report = {
        **{"version": "1.2", "kubelet": "/kubelet", "defaultMode": "audit", "maxMode": "strict"},
        **{"maxModeFrom": "the label", "findings": [{"sentence": "It is so."}]},
        "pods": [
            pod("web", "Enforced"),
            pod("db", "Strict", mode="strict"),
            pod("host", "HostNetwork"),
            "text",
            pod("new"),
            pod("held", "Audit", "False"),
        ],
    }
    pending = "The agent has not published its condition yet."
    assert read(report, is_ready=True) == NodeStatus(
        "a",
        version="1.2",
        is_ready=True,
        kubelet="/kubelet",
        default_mode="audit",
        max_mode="strict",
        max_mode_from="the label",
        findings=tuple(findings.read("a", report["findings"])),
        desired={"enforce": 3, "strict": 1},
        in_force={"enforce": 1, "strict": 1},
        pods=(
            PodInForce("a", "shop", "web", "enforce", "enforce", "Enforced", "So."),
            PodInForce("a", "shop", "db", "strict", "strict", "Strict", "So."),
            PodInForce("a", "shop", "new", "enforce", "none", "Pending", pending),
            PodInForce("a", "shop", "held", "enforce", "none", "Audit", "So."),
        ),
    )


def test_report_of_another_version_has_what_it_has() -> None:
    unknown = dict.fromkeys(("version", "default_mode", "max_mode"), "unknown")
    assert read({"later": 1}) == NodeStatus("a", **unknown)  # type: ignore[arg-type]
    assert read({"version": 7, "kubelet": None, "pods": [{"mode": 7}]}) == NodeStatus(
        "a",
        **unknown,  # type: ignore[arg-type]
        pods=(
            PodInForce(
                *("a", "", "", "", "none", "Pending"),
                "The agent has not published its condition yet.",
            ),
        ),
    )


@pytest.mark.parametrize("report", ["text", [], {}, {"version": "1.2", "pods": "text"}])
def test_answer_that_is_no_report_is_the_nodes_problem(report: Any) -> None:
    problem = "its agent's answer is not readable; is it another version?"
    expected = NodeStatus("a", problem, findings=(findings.no_answer("a", problem),))
    assert read(report) == expected


def test_node_without_an_answer_has_the_findings_of_its_pins() -> None:
    found = [{"sentence": "It is open.", "kind": "gates-open"}]
    of_pins = tuple(findings.read("a", found))
    assert read({"findings": found}, problem="It hangs") == NodeStatus(
        "a", "It hangs", findings=of_pins
    )
    for is_selected in (True, False):
        own = findings.no_answer("a", "It hangs", is_selected=is_selected)
        expected = NodeStatus("a", "It hangs", findings=(own,))
        assert read({}, problem="It hangs", is_selected=is_selected) == expected


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        ({"pods": [], "gates": []}, ""),
        ({"version": "1"}, ""),
        ([], ""),
        ({"gates": []}, "no agent responds"),
        (
            {
                "gates": [],
                "findings": [
                    {"kind": kinds.AGENT_DEAD.name, "sentence": "It is dead."},
                    {"kind": kinds.GATE_DETACHED.name, "sentence": "One is detached."},
                    {"kind": kinds.GATES_OPEN_SOON.name, "sentence": "All open soon."},
                ],
            },
            "It is dead. All open soon",
        ),
    ],
)
def test_answer_without_an_agent_is_a_problem(
    kubectl: KubectlStandin, cluster: Cluster, report: Any, problem: str
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", output=report)
    (answer,) = node_status.query(cluster)
    assert answer == NodeAnswer("a", json.dumps(report), problem, is_ready=True)


def test_agents_of_other_versions_are_one_note() -> None:
    versions = {"a": VERSION, "b": "9.1", "c": "", "d": "8.0", "e": "9.1"}
    nodes = [NodeStatus(name, version=version) for name, version in versions.items()]
    assert node_status.version_notes(nodes) == [
        f"This plugin is version {VERSION}, agents on b, d, e are 8.0, 9.1: what only one of them "
        "has is not shown."
    ]
    assert node_status.version_notes([nodes[0], nodes[2]]) == []
