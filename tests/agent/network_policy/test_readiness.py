"""The condition policy-ready of one pod: what is tried until when, and what stays."""

import asyncio
import ipaddress
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from agent import labels
from agent.kube.objects import PodCondition
from agent.network_policy import outcomes, readiness, trials
from agent.network_policy.policy_set import PolicySet
from agent.network_policy.readiness import PolicyReadiness
from agent.network_policy.trials import Trial
from agent.pods.conditions import Conditions
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod_state import AddressClaims, PodState
from agent.pods.store import PodStore
from agent.settings import PolicyReadyMode, PolicyReadySettings
from probes.netns import Netns, NetnsGoneError
from tests.agent.network_policy.test_checks import ingress
from tests.agent.strict.strict_pods import strict_pod

pytestmark = pytest.mark.looptime

IN_FORCE = Trial(True, "it is dropped")
NOT_IN_FORCE = Trial(False, "it arrives")


class Policies:
    """A watch of NetworkPolicies: one for the namespace of all pods."""

    def __init__(self) -> None:
        self.problem = ""
        self.policies = PolicySet((ingress(),))
        self.changed = asyncio.Event()

    def restore(self) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()


class Node:
    """Its pods, and what their trials show: `shown`, or an error."""

    def __init__(self, state: pathlib.Path, mode: PolicyReadyMode) -> None:
        self.conditions = Conditions()
        self.store = PodStore(self.conditions)
        self.policies: Policies | None = Policies()
        self.shown: Trial | Exception = NOT_IN_FORCE
        self.trials = 0
        self.reported: dict[str, PodCondition] = {}
        self.state = state
        self._settings = PolicyReadySettings(mode, timeout_seconds=30)

    async def run_trial(self, *_: Any) -> Trial:
        self.trials += 1
        await asyncio.sleep(0.1)
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[None]:
        """One life of the agent, half a second old."""
        self.conditions = self.store.conditions = Conditions()
        made = PolicyReadiness(
            self._settings,
            self.policies,  # type: ignore[arg-type]
            store=self.store,
            object_labels=ObjectLabels(),
            namespace="podgate",
            state=self.state,
            reported=self.reported.get,
        )
        task = asyncio.create_task(made.run())
        try:
            await asyncio.sleep(0.5)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def put(self, state: PodState, **fields: Any) -> PodState:
        """fields: of its `Pod`."""
        state.pod = msgspec.structs.replace(state.pod, **fields)
        self.store.pods[state.pod.uid] = state
        self.store.in_force.mark(state.pod.uid)
        return state

    def put_web(self, **fields: Any) -> PodState:
        return self.put(strict_pod("web", "198.18.0.3"), awaits_policies=True, **fields)

    def put_witness(self) -> PodState:
        of_witness = {labels.NAME: labels.WITNESS_NAME}
        return self.put(strict_pod("witness", "198.18.0.9"), namespace="podgate", labels=of_witness)

    def found(self, name: str = "web") -> tuple[str, str]:
        """Status and reason."""
        condition = self.conditions.get(f"uid-{name}", labels.POLICY_READY)
        return (condition.status, condition.reason) if condition else ("", "")


@pytest.fixture
def node(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Node:
    made = Node(tmp_path / "policyready.json", getattr(request, "param", PolicyReadyMode.WAIT))
    monkeypatch.setattr(trials, "run", made.run_trial)
    # The namespaces are not real.
    monkeypatch.setattr(readiness, "sandbox_of", lambda netns: netns.path)
    return made


PENDING = ("False", outcomes.PENDING)
PROGRAMMED = ("True", outcomes.PROGRAMMED)


async def test_condition_becomes_true_within_a_second_of_the_policies_and_stays(node: Node) -> None:
    async with node.agent():
        node.put_witness()
        node.put_web()
        await asyncio.sleep(20)
        assert node.found() == PENDING
        node.shown = IN_FORCE
        await asyncio.sleep(1.7)
        assert node.found() == PROGRAMMED
        tried, node.shown = node.trials, NOT_IN_FORCE
        node.put_web()
        await asyncio.sleep(60)
        assert (node.found(), node.trials) == (PROGRAMMED, tried)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (PolicyReadyMode.WAIT, ("False", outcomes.NOT_PROGRAMMED)),
        (PolicyReadyMode.READY, ("True", outcomes.UNCONFIRMED)),
    ],
    indirect=["node"],
)
async def test_after_the_time_out_the_owner_has_chosen(
    node: Node, expected: tuple[str, str]
) -> None:
    async with node.agent():
        node.put_witness()
        node.put_web()
        await asyncio.sleep(29)
        assert node.found() == PENDING
        await asyncio.sleep(3)
        assert node.found() == expected
        node.shown = IN_FORCE
        await asyncio.sleep(15)
        assert node.found() == (PROGRAMMED if expected[0] == "False" else expected)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("witness", outcomes.NO_WITNESS),
        ("policies", outcomes.UNKNOWN),
        ("descriptors", outcomes.FAILED),
        ("namespace", outcomes.FAILED),
    ],
)
async def test_what_is_missing_is_the_reason_after_the_time_out(
    node: Node, missing: str, reason: str
) -> None:
    async with node.agent():
        if missing != "witness":
            node.put_witness()
        if missing == "policies":
            assert node.policies
            node.policies.problem = "The API server has not listed them yet."
        if missing == "descriptors":
            node.shown = OSError(24, "Too many open files")
        if missing == "namespace":
            node.shown = NetnsGoneError("it is gone.")
        node.put_web()
        await asyncio.sleep(35)
        assert node.found() == ("False", reason)


async def test_witness_or_policy_that_changes_is_worth_a_try_at_once(node: Node) -> None:
    node.shown = IN_FORCE
    async with node.agent():
        node.put_web()
        await asyncio.sleep(60)
        assert node.found() == ("False", outcomes.NO_WITNESS)
        node.put_witness()
        await asyncio.sleep(0.2)
        assert node.found() == PROGRAMMED


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"namespace": "other"}, ("True", outcomes.NO_POLICIES)),
        ({"host_network": True}, ("True", outcomes.NO_POLICIES)),
        ({"awaits_policies": False}, ("", "")),
    ],
)
async def test_pods_that_nothing_is_tried_for(
    node: Node, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    async with node.agent():
        node.put(strict_pod("web", "198.18.0.3"), **{"awaits_policies": True, **fields})
        await asyncio.sleep(1)
        assert (node.found(), node.trials) == (expected, 0)


async def test_agent_that_checks_nothing_is_the_reason(node: Node) -> None:
    node.policies = None
    async with node.agent():
        node.put_web()
        await asyncio.sleep(1)
        assert node.found() == ("False", outcomes.OFF)


async def test_pod_without_an_address_waits_for_one(node: Node) -> None:
    node.shown = IN_FORCE
    async with node.agent():
        node.put_witness()
        web = node.put_web()
        confirmed, web.claims = web.claims, AddressClaims()
        await asyncio.sleep(1)
        assert (node.found(), node.trials) == (PENDING, 0)
        web.claims = confirmed
        node.store.in_force.mark(web.pod.uid)
        await asyncio.sleep(1)
        assert node.found() == PROGRAMMED


async def test_both_families_of_a_pod_are_awaited(node: Node) -> None:
    node.shown = IN_FORCE
    reported = tuple(map(ipaddress.ip_address, ("198.18.0.3", "fd00:18::3")))
    async with node.agent():
        node.put_witness()
        web = node.put_web(reported_addresses=reported)
        await asyncio.sleep(1)
        assert (node.found(), node.trials) == (PENDING, 0)
        web.claims = AddressClaims(reported)
        await asyncio.sleep(2)
        assert node.found() == PROGRAMMED


async def test_result_outlives_the_agent_and_not_the_sandbox(node: Node) -> None:
    node.shown = IN_FORCE
    node.put_witness()
    web = node.put_web()
    async with node.agent():
        await asyncio.sleep(2)
        assert node.found() == PROGRAMMED
    node.shown = NOT_IN_FORCE
    async with node.agent():
        assert node.found() == PROGRAMMED
        web.netns = Netns("/run/netns/next", 4, 99)
        node.store.in_force.mark(web.pod.uid)
        await asyncio.sleep(1)
        assert node.found() == PENDING


async def test_agent_without_its_file_takes_what_the_api_server_has(node: Node) -> None:
    node.put_witness()
    node.put_web()
    node.reported["uid-web"] = PodCondition(
        type=labels.POLICY_READY, status="True", reason=outcomes.PROGRAMMED, message="Seen."
    )
    async with node.agent():
        assert (node.found(), node.trials) == (PROGRAMMED, 0)


async def test_what_the_api_server_has_counts_also_when_it_comes_late(node: Node) -> None:
    async with node.agent():
        node.put_witness()
        node.put_web()
        await asyncio.sleep(1)
        assert node.found() == PENDING
        node.reported["uid-web"] = PodCondition(
            type=labels.POLICY_READY, status="True", reason=outcomes.PROGRAMMED, message="Seen."
        )
        node.put_web()
        await asyncio.sleep(10)
        assert node.found() == PROGRAMMED


async def test_pod_that_ended_while_no_agent_ran_is_in_the_file_no_longer(node: Node) -> None:
    node.shown = IN_FORCE
    node.put_witness()
    node.put_web()
    async with node.agent():
        await asyncio.sleep(2)
    assert "uid-web" in node.state.read_text("utf-8")
    del node.store.pods["uid-web"]
    node.store.synced.set()
    async with node.agent():
        node.put(strict_pod("other", "198.18.0.4"), awaits_policies=True)
        await asyncio.sleep(2)
    assert "uid-other" in node.state.read_text("utf-8")
    assert "uid-web" not in node.state.read_text("utf-8")


async def test_check_ends_with_its_pod(node: Node) -> None:
    async with node.agent():
        node.put_witness()
        web = node.put_web()
        await asyncio.sleep(1)
        node.put(web, is_deleting=True)
        await asyncio.sleep(2)
        tried = node.trials
        await asyncio.sleep(10)
        assert node.trials == tried


async def test_pod_of_another_namespace_is_no_witness(node: Node) -> None:
    node.shown = IN_FORCE
    async with node.agent():
        of_witness = {labels.NAME: labels.WITNESS_NAME}
        node.put(strict_pod("witness", "198.18.0.9"), namespace="shop", labels=of_witness)
        node.put_web()
        await asyncio.sleep(60)
        assert node.found() == ("False", outcomes.NO_WITNESS)
