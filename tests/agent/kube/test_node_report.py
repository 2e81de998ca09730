"""The report of a node has a size that does not depend on the number of policies, and changes with
more than numbers of pods."""

from typing import Any

import msgspec
import pytest

from agent.kube.node_report import NodePolicies, NodeStatus, NodeSummary
from agent.kube.objects import ObjectMetadata


def _policies(count: int) -> list[ObjectMetadata]:
    return [ObjectMetadata(name=f"p{number}", uid="u", generation=3) for number in range(count)]


def test_thousand_policies_take_as_many_bytes_as_one() -> None:
    sizes = [
        len(msgspec.json.encode(NodeStatus("0.1.0", NodePolicies.of(_policies(count), {}))))
        for count in (1, 1000)
    ]
    assert sizes[1] - sizes[0] <= 3
    assert sizes[1] < 100


def test_problems_are_reported_with_their_generation_and_bounded() -> None:
    policies = _policies(1000)
    found = NodePolicies.of(policies, {one.name: "x" * 5000 for one in policies})
    assert len(found.failed) == 64
    assert (found.failed[0].name, found.failed[0].generation) == ("p0", 3)
    assert {len(one.message) for one in found.failed} == {1024}
    assert NodePolicies.of(policies, {"deleted": "x"}).failed == ()


def test_revision_is_that_of_the_same_versions_in_any_order() -> None:
    policies = _policies(3)
    found = NodePolicies.of(policies, {}).revision
    assert NodePolicies.of(policies[::-1], {}).revision == found
    assert len(found) == 16
    others = [
        policies[:2],
        [*policies[:2], ObjectMetadata(name="p2", uid="u", generation=4)],
        [*policies[:2], ObjectMetadata(name="p2", uid="v", generation=3)],
        [*policies[:2], ObjectMetadata(name="p3", uid="u", generation=3)],
    ]
    assert len({found, *(NodePolicies.of(one, {}).revision for one in others)}) == 5


IN_ORDER = NodeStatus(
    "0.1.0",
    NodePolicies("r1"),
    NodeSummary("audit", "strict", True, 0, {"enforce": 2}, {"enforce": 2}),
    NodePolicies("e1"),
)


@pytest.mark.parametrize(
    ("fields", "differs"),
    [
        ({}, False),
        ({"desired": {"enforce": 3}, "in_force": {"enforce": 3}}, False),
        ({"desired": {"enforce": 3}}, True),
        ({"default_mode": "enforce"}, True),
        ({"max_mode": "audit"}, True),
        ({"has_kubelet": False}, True),
        ({"problems": 1}, True),
    ],
)
def test_number_of_pods_alone_is_no_other_status(fields: dict[str, Any], *, differs: bool) -> None:
    assert IN_ORDER.summary is not None
    summary = msgspec.structs.replace(IN_ORDER.summary, **fields)
    other = msgspec.structs.replace(IN_ORDER, summary=summary)
    assert other.differs_from(IN_ORDER) is differs


@pytest.mark.parametrize(
    "fields",
    [
        {"agent_version": "0.2.0"},
        {"policies": NodePolicies("r2")},
        {"policies": None},
        {"summary": None},
        {"egress_policies": NodePolicies("e2")},
    ],
)
def test_other_version_or_policies_are_another_status(fields: dict[str, Any]) -> None:
    other = msgspec.structs.replace(IN_ORDER, **fields)
    assert other.differs_from(IN_ORDER)
    assert IN_ORDER.differs_from(other)
