"""What staged policies would admit of the observed flows, and when it is counted again."""

from collections.abc import Sequence
from typing import cast

import msgspec
import pytest

from agent.admin.observations import Observations
from agent.admin.report import PolicyStatus, RuleStatus
from agent.metrics import MetricFamily
from agent.pods.conditions import Conditions
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.policy.api_types import Policy
from agent.policy.controller import PolicyController
from agent.policy.staged import STAGED_PACKETS, StagedPolicies, packets_by_rule
from bpf.verdicts import Mode
from tests.agent.policy.observing import OTHER, flows, node
from tests.agent.policy.test_review import A, B, policy, unit

STAGED = policy("a", unit("a.service"), action="Audit")


def packets(staged: Sequence[Policy], in_force: Sequence[Policy], seen: Observations) -> int:
    return sum(packets_by_rule(staged, in_force, seen.flows).values())


def test_packets_of_its_source_to_its_pods_and_port_count() -> None:
    seen = node(flows(A, packets=3), flows(B), flows(A, port=81), flows(A, pod=OTHER))
    assert packets([STAGED], [], seen) == 3


def test_packets_that_a_policy_in_force_admits_by_now_do_not_count() -> None:
    seen = node(flows(A, packets=3))
    assert packets([STAGED], [policy("b", unit("a.service"))], seen) == 0
    assert packets([STAGED], [policy("b", unit("b.service"))], seen) == 3


class _Controller:
    """The part of the policy controller that is read."""

    def __init__(self) -> None:
        self.staged: tuple[Policy, ...] = (STAGED,)
        self.policies: tuple[Policy, ...] = ()


class Counted:
    """Staged policies whose clock, pods and history the test has."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = PodStore(Conditions())
        self.seen = node(flows(A, packets=3))
        self.reads = 0
        self.controller = _Controller()
        self.made = StagedPolicies(
            cast(PolicyController, self.controller),
            self._read,
            store=self.store,
            labels=ObjectLabels(),
            clock=lambda: self.now,
        )

    def _read(self) -> Observations:
        self.reads += 1
        return self.seen

    async def samples(self) -> dict[str, float]:
        await self.made.refresh()
        (family,) = self.made.collect()
        assert family.name == _name(STAGED_PACKETS)
        return {sample.labels["policy"]: sample.value for sample in family.samples}


def _name(family: MetricFamily) -> str:
    return family.name


@pytest.fixture
def counted() -> Counted:
    return Counted()


async def test_history_is_read_again_once_a_minute_and_for_other_policies(
    counted: Counted,
) -> None:
    assert await counted.samples() == {"a": 3}
    counted.seen = node(flows(A, packets=4))
    counted.now = 59.0
    assert await counted.samples() == {"a": 3}
    counted.now = 60.0
    assert await counted.samples() == {"a": 4}
    counted.seen = node(flows(A, packets=5))
    counted.now = 119.0
    assert await counted.samples() == {"a": 4}
    counted.controller.staged = (policy("c", unit("b.service"), action="Audit"),)
    assert await counted.samples() == {"c": 0}
    assert counted.reads == 3


async def test_history_is_not_read_without_staged_policies(counted: Counted) -> None:
    counted.controller.staged = ()
    assert await counted.samples() == {}
    assert await counted.made.statuses() == []
    assert counted.reads == 0


async def test_status_has_the_gated_pods_that_it_selects_and_packets_of_each_rule(
    counted: Counted,
) -> None:
    labels = {"app": "web"}
    for name, namespace, fields in (
        ("web-2", "shop", {"mode": Mode.ENFORCE}),
        ("web-1", "shop", {"mode": Mode.AUDIT}),
        ("off", "shop", {"mode": Mode.OFF}),
        ("host", "shop", {"mode": Mode.AUDIT, "host_network": True}),
        ("web", "else", {"mode": Mode.AUDIT}),
    ):
        pod = Pod(uid=f"{namespace}/{name}", namespace=namespace, name=name, labels=labels)
        counted.store.set_pod(msgspec.structs.replace(pod, **fields))
    ports = [{"port": 80}, {"port": 90}]
    counted.controller.staged = (policy("a", unit("a.service"), action="Audit", ports=ports),)
    counted.seen = node(flows(A, packets=3), flows(A, port=90, packets=4), flows(B))
    rules = [
        RuleStatus(source="unit a.service", protocol="TCP", ports=port, hits=count, problem="")
        for port, count in (("80", 3), ("90", 4))
    ]
    assert await counted.made.statuses() == [
        PolicyStatus(
            name="a", source="file", pods=["shop/web-1", "shop/web-2"], rules=rules, action="Audit"
        )
    ]
