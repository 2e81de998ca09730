"""Which nodes podgate knows: by the DaemonSet's selection, and by what nodes have reported."""

from typing import Any

import pytest

from agent.operate.kubectl import nodes
from agent.operate.kubectl.nodes import ClusterNode
from tests.agent.operate.kubectl.standin import node


def daemonset(*expressions: dict[str, Any], **selector: str) -> dict[str, Any]:
    """Its pods need these labels, and all of these expressions of node affinity."""
    spec: dict[str, Any] = {"nodeSelector": selector}
    if expressions:
        term = {"matchExpressions": list(expressions)}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        spec["affinity"] = {"nodeAffinity": required}
    return {"spec": {"template": {"spec": spec}}}


def test_node_that_reported_is_listed_although_it_is_not_selected() -> None:
    found = nodes.collect(daemonset(zone="1"), [node("a", zone="1"), node("b"), node("c")], ["b"])
    assert found == [ClusterNode("a"), ClusterNode("b", is_selected=False)]


def test_node_without_a_node_object_is_listed_with_the_reason() -> None:
    (found,) = nodes.collect(daemonset(), [], ["gone"])
    assert found.problem == "there is no Node of this name any more"


def test_node_that_is_not_ready_has_the_reason_of_its_condition() -> None:
    (found,) = nodes.collect(daemonset(), [node("a", ready="Unknown")], [])
    assert found.problem == (
        "its Node is NotReady since 2026-11-22T09:00:00Z (Kubelet stopped posting node status)"
    )


@pytest.mark.parametrize(
    ("expression", "is_selected"),
    [
        ({"operator": "In", "values": ["x", "one"]}, True),
        ({"operator": "In", "values": ["x"]}, False),
        ({"operator": "NotIn", "values": ["one"]}, False),
        ({"operator": "NotIn", "values": ["x"]}, True),
        ({"operator": "Exists"}, True),
        ({"operator": "DoesNotExist"}, False),
        ({"key": "absent", "operator": "NotIn", "values": ["x"]}, True),
        ({"key": "absent", "operator": "DoesNotExist"}, True),
        ({"key": "absent", "operator": "Gt", "values": ["1"]}, False),
        ({"key": "size", "operator": "Gt", "values": ["2"]}, True),
        ({"key": "size", "operator": "Lt", "values": ["2"]}, False),
        ({"key": "zone", "operator": "Gt", "values": ["2"]}, False),
        ({"key": "size", "operator": "Gt", "values": ["3"]}, False),
        ({"key": "size", "operator": "Lt", "values": ["3"]}, False),
        ({"key": "size", "operator": "Lt", "values": ["4"]}, True),
        ({"key": "cold", "operator": "Lt", "values": ["-1"]}, True),
        ({"key": "absent", "operator": "Lt", "values": ["1"]}, False),
        ({"key": "absent", "operator": "In", "values": ["x"]}, False),
        ({"key": "absent", "operator": "Exists"}, False),
        ({"operator": "Later"}, True),
    ],
)
def test_node_affinity_of_the_daemonset_counts(
    expression: dict[str, Any], *, is_selected: bool
) -> None:
    found = nodes.collect(
        daemonset({"key": "zone", **expression}), [node("a", zone="one", size="3", cold="-2")], []
    )
    assert bool(found) is is_selected


def test_terms_of_node_affinity_are_alternatives() -> None:
    made = daemonset({"key": "zone", "operator": "In", "values": ["other"]})
    affinity = made["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (required,) = affinity.values()
    field = {"key": "metadata.name", "operator": "In", "values": ["b"]}
    required["nodeSelectorTerms"].append({"matchFields": [field]})
    found = nodes.collect(made, [node("a", zone="one"), node("b", zone="one")], [])
    assert [one.name for one in found] == ["b"]


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        (
            {"status": "False", "reason": "KubeletNotReady"},
            "its Node is NotReady (KubeletNotReady)",
        ),
        ({"status": "Unknown"}, "its Node is NotReady"),
        ({"status": "True", "message": "ready"}, ""),
    ],
)
def test_condition_of_a_node_may_lack_its_time_and_message(
    condition: dict[str, Any], problem: str
) -> None:
    made = node("a")
    pressure = {"type": "MemoryPressure", "status": "False"}
    made["status"]["conditions"] = [pressure, {"type": "Ready", **condition}]
    (found,) = nodes.collect(daemonset(), [made], [])
    assert found.problem == problem


def test_every_expression_of_a_term_has_to_match() -> None:
    made = daemonset(
        {"key": "zone", "operator": "In", "values": ["one"]}, {"key": "size", "operator": "Exists"}
    )
    found = nodes.collect(made, [node("a", zone="one"), node("b", zone="one", size="3")], [])
    assert [one.name for one in found] == ["b"]
