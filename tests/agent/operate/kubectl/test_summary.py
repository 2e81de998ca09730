"""A cluster in one sentence."""

import pytest

from agent.operate.kubectl import summary
from agent.operate.kubectl.findings import Finding
from agent.operate.kubectl.node_status import NodeStatus
from agent.operate.kubectl.summary import Summary

FINE = {"is_ready": True, "kubelet": "/kubelet"}


def finding(severity: str) -> Finding:
    return Finding("x", severity, "off", "node", "It is so.")


def node(name: str, **fields: object) -> NodeStatus:
    return NodeStatus(name, **{**FINE, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "is_in_order"),
    [
        ({}, True),
        ({"findings": (finding("note"),)}, True),
        ({"findings": (finding("note"), finding("degraded"))}, False),
        ({"problem": "It hangs"}, False),
        ({"is_ready": False}, False),
        ({"kubelet": ""}, False),
        ({"desired": {"audit": 1}, "in_force": {"audit": 1}}, True),
        ({"desired": {"audit": 1}}, False),
    ],
)
def test_node_is_in_order_if_nothing_but_notes_is_to_report(
    fields: dict[str, object], is_in_order: bool
) -> None:
    assert summary.is_in_order(node("a", **fields)) is is_in_order


def test_nodes_and_pods_are_counted() -> None:
    nodes = [
        node("a", desired={"audit": 1, "strict": 2}, in_force={"audit": 1, "strict": 2}),
        node("b", desired={"strict": 3}, in_force={"enforce": 1, "strict": 2}),
        node("c", problem="It hangs"),
        node("d", kubelet=""),
        node("e"),
        node("f"),
    ]
    found = summary.summarize(nodes)
    desired, in_force = {"audit": 1, "strict": 5}, {"audit": 1, "strict": 4, "enforce": 1}
    assert found == Summary(6, 3, 2, 1, desired, in_force)
    assert found.text() == (
        "6 nodes: 3 in order, 2 with findings, 1 without an answer. "
        "Pods: 1/1 audit, 1/0 enforce, 4/5 strict."
    )
    assert summary.summarize(nodes[4:5]).text() == "1 node: 1 in order. Pods: none."
    assert [one.node for one in summary.worst_first(nodes[::-1])] == ["c", "b", "d", "a", "e", "f"]
