"""The report of a node has a size that does not depend on the number of policies."""

import msgspec

from agent.kube.node_report import NodePolicies, NodeStatus
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
