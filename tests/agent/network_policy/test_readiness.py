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
from agent.network_policy.checks import Checks, Flow
from agent.network_policy.policy_set import PolicySet
from agent.network_policy.readiness import PolicyReadiness
from agent.network_policy.trials import Place, Trial
from agent.pods.conditions import Conditions
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod_state import AddressClaims, PodState
from agent.pods.store import PodStore
from agent.settings import PolicyReadyMode, PolicyReadySettings
from probes.netns import Netns, NetnsGoneError
from probes.spec.specs import parse_pod
from tests.agent.network_policy.test_checks import ingress, policy
from tests.agent.strict.strict_pods import strict_pod

pytestmark = pytest.mark.looptime

IN_FORCE = Trial(True, "it is dropped")
NOT_IN_FORCE = Trial(False, "it arrives")


class Policies:
    """A watch of NetworkPolicies: one for the namespace of all pods."""

    def __init__(self) -> None:
        self.is_restored = self.is_followed = False
        self.problem = ""
        self.policies = PolicySet((ingress(),))
        self.changed = asyncio.Event()

    def restore(self) -> None:
        self.is_restored = True

    async def run(self) -> None:
        self.is_followed = True
        await asyncio.Event().wait()


class Node:
    """Its pods, and what their trials show: `shown`, or an error."""

    def __init__(self, state: pathlib.Path, mode: PolicyReadyMode) -> None:
        self.conditions = Conditions()
        self.store = PodStore(self.conditions)
        self.policies: Policies | None = Policies()
        self.shown: Trial | Exception = NOT_IN_FORCE
        self.trials = 0
        self.tried: list[Checks] = []
        self.families: list[list[int]] = []
        self.readiness: PolicyReadiness | None = None
        self.reported: dict[str, PodCondition] = {}
        self.state = state
        self._settings = PolicyReadySettings(mode, timeout_seconds=30)

    async def run_trial(self, checks: Checks, *ends: Place) -> Trial:
        self.trials += 1
        self.tried.append(checks)
        self.families.append([end.address.version for end in ends])
        await asyncio.sleep(0.1)
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[None]:
        """One life of the agent, half a second old."""
        self.conditions = self.store.conditions = Conditions()
        made = self.readiness = PolicyReadiness(
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
            (end,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(end, asyncio.CancelledError), end

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

    def message(self, name: str = "web") -> str:
        condition = self.conditions.get(f"uid-{name}", labels.POLICY_READY)
        return condition.message if condition else ""

    def metrics(self, name: str) -> dict[str, float]:
        """Values of samples with this name, by their reason."""
        assert self.readiness is not None
        return {
            sample.labels.get("reason", ""): sample.value
            for family in self.readiness.collect()
            for sample in family.samples
            if sample.name == name
        }

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
        assert node.policies
        assert node.policies.is_restored
        assert node.policies.is_followed
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
        await asyncio.sleep(100)
        node.put_witness()
        node.put_web()
        await asyncio.sleep(29)
        assert node.found() == PENDING
        await asyncio.sleep(3)
        assert node.found() == expected
        is_ready = expected[0] == "True"
        waited = "Not confirmed within 30 s (--policy-ready=ready): " if is_ready else ""
        assert node.message() == f"{waited}It arrives."
        node.shown = IN_FORCE
        await asyncio.sleep(15)
        assert node.found() == (PROGRAMMED if expected[0] == "False" else expected)


@pytest.mark.parametrize(
    ("missing", "reason", "message"),
    [
        (
            "witness",
            outcomes.NO_WITNESS,
            "No witness runs on this node: a pod of the DaemonSet podgate-witness.",
        ),
        (
            "family",
            outcomes.NO_WITNESS,
            "The witness podgate/witness has no address of a family that the pod has.",
        ),
        (
            "address",
            outcomes.FAILED,
            "Not all addresses of the pod are confirmed yet.",
        ),
        ("policies", outcomes.UNKNOWN, "The API server has not listed them yet."),
        ("descriptors", outcomes.FAILED, "The check failed: Too many open files."),
        ("namespace", outcomes.FAILED, "A pod ended during its check: it is gone."),
    ],
)
async def test_what_is_missing_is_the_reason_after_the_time_out(
    node: Node, missing: str, reason: str, message: str
) -> None:
    v4, v6 = map(ipaddress.ip_address, ("198.18.0.3", "fd00:18::3"))
    async with node.agent():
        if missing != "witness":
            witness = node.put_witness()
            if missing == "family":
                witness.claims = AddressClaims((v6,))
        if missing == "policies":
            assert node.policies
            node.policies.problem = "The API server has not listed them yet."
        if missing == "descriptors":
            node.shown = OSError(24, "Too many open files")
        if missing == "namespace":
            node.shown = NetnsGoneError("it is gone.")
        node.put_web(reported_addresses=(v4, v6) if missing == "address" else ())
        await asyncio.sleep(5)
        assert (node.found(), node.message()) == (PENDING, message)
        await asyncio.sleep(30)
        assert (node.found(), node.message()) == (("False", reason), message)


async def test_witness_or_policy_that_changes_is_worth_a_try_at_once(node: Node) -> None:
    node.shown = IN_FORCE
    async with node.agent():
        node.put_web()
        # Between two of the tries that come every ten seconds.
        await asyncio.sleep(65)
        assert node.found() == ("False", outcomes.NO_WITNESS)
        node.put_witness()
        await asyncio.sleep(0.2)
        assert node.found() == PROGRAMMED
        assert node.policies
        node.policies.problem = "They are not listed."
        node.put(strict_pod("next", "198.18.0.4"), awaits_policies=True)
        await asyncio.sleep(65)
        assert node.found("next") == ("False", outcomes.UNKNOWN)
        node.policies.problem = ""
        node.policies.changed.set()
        await asyncio.sleep(0.2)
        assert node.found("next") == PROGRAMMED


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
        netns, confirmed = web.netns, web.claims
        for web.netns, web.claims in ((netns, AddressClaims()), (None, confirmed)):
            node.store.in_force.mark(web.pod.uid)
            await asyncio.sleep(1)
            assert (node.found(), node.trials) == (PENDING, 0)
            assert node.message() == "The pod has no address yet."
        web.netns = netns
        node.store.in_force.mark(web.pod.uid)
        await asyncio.sleep(1)
        assert node.found() == PROGRAMMED


async def test_pod_that_loses_its_address_is_not_tried_until_it_has_one(node: Node) -> None:
    async with node.agent():
        node.put_witness()
        web = node.put_web()
        await asyncio.sleep(5)
        confirmed, web.claims = web.claims, AddressClaims()
        node.store.in_force.mark(web.pod.uid)
        await asyncio.sleep(1)
        tried = node.trials
        await asyncio.sleep(20)
        assert (node.trials, node.message()) == (tried, "The pod has no address yet.")
        web.claims, node.shown = confirmed, IN_FORCE
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
        assert (node.trials, node.message()) == (1, "It is dropped."), "the witness has one"


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


@pytest.mark.parametrize("has_file", [True, False], ids=["file", "api"])
async def test_restarted_agent_never_has_a_ready_pod_as_false(
    node: Node, *, has_file: bool
) -> None:
    """Its conditions are written before its gates are attached and its addresses confirmed."""
    node.shown = IN_FORCE
    node.put_witness()
    web = node.put_web(netns_path="/run/netns/web")
    async with node.agent():
        await asyncio.sleep(2)
        assert node.found() == PROGRAMMED
    if not has_file:
        node.state.unlink()
        node.reported["uid-web"] = PodCondition(
            type=labels.POLICY_READY, status="True", reason=outcomes.PROGRAMMED, message="Seen."
        )
    node.shown = NOT_IN_FORCE
    netns, confirmed = web.netns, web.claims
    web.netns, web.claims = None, AddressClaims()
    at_first = ("", "") if has_file else PROGRAMMED
    async with node.agent():
        assert node.found() == at_first
        for web.netns, web.claims in ((netns, AddressClaims()), (netns, confirmed)):
            node.store.in_force.mark(web.pod.uid)
            await asyncio.sleep(1)
            assert (node.found(), node.trials) == (PROGRAMMED, 1)


async def test_agent_without_its_file_takes_what_the_api_server_has(node: Node) -> None:
    node.put_witness()
    node.put_web()
    node.reported["uid-web"] = PodCondition(
        type=labels.POLICY_READY, status="True", reason=outcomes.PROGRAMMED, message="Seen."
    )
    async with node.agent():
        assert (node.found(), node.trials) == (PROGRAMMED, 0)
        # Nor does it forget that.
        node.reported.clear()
        node.put_web()
        await asyncio.sleep(1)
        assert (node.found(), node.message(), node.trials) == (PROGRAMMED, "Seen.", 0)


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


@pytest.mark.parametrize(
    "fields",
    [
        {"namespace": "shop"},
        {"labels": {}},
        {"is_deleting": True},
        {"host_network": True},
    ],
)
async def test_other_pod_is_no_witness(node: Node, fields: dict[str, Any]) -> None:
    node.shown = IN_FORCE
    async with node.agent():
        of_witness = {"namespace": "podgate", "labels": {labels.NAME: labels.WITNESS_NAME}}
        node.put(strict_pod("witness", "198.18.0.9"), **(of_witness | fields))
        node.put_web()
        await asyncio.sleep(60)
        assert node.found() == ("False", outcomes.NO_WITNESS)
        node.put_witness()
        await asyncio.sleep(0.2)
        assert node.found() == PROGRAMMED


async def test_witness_without_an_address_is_awaited(node: Node) -> None:
    node.shown = IN_FORCE
    async with node.agent():
        witness = node.put_witness()
        confirmed, witness.claims = witness.claims, AddressClaims()
        node.put_web()
        await asyncio.sleep(60)
        assert node.found() == ("False", outcomes.NO_WITNESS)
        assert node.message().startswith("No witness runs on this node")
        witness.claims = confirmed
        node.put_witness()
        await asyncio.sleep(0.2)
        assert node.found() == PROGRAMMED


async def test_both_families_and_directions_are_tried(node: Node) -> None:
    both = policy(policyTypes=["Ingress", "Egress"])
    assert node.policies
    node.policies.policies = PolicySet((both,))
    node.shown = IN_FORCE
    addresses = tuple(map(ipaddress.ip_address, ("198.18.0.3", "fd00:18::3")))
    others = tuple(map(ipaddress.ip_address, ("fd00:18::9", "198.18.0.9")))
    async with node.agent():
        node.put_witness().claims = AddressClaims(others)
        node.put_web(reported_addresses=addresses).claims = AddressClaims(addresses)
        await asyncio.sleep(5)
        assert (node.found(), node.message()) == (PROGRAMMED, "It is dropped.")
        assert node.families == [[4, 4], [4, 4], [6, 6], [6, 6]]


async def test_ports_by_name_are_those_of_the_pod_with_their_protocol(node: Node) -> None:
    ports = [
        {"name": "http", "containerPort": 8080},
        {"name": "http", "containerPort": 53, "protocol": "UDP"},
    ]
    spec = parse_pod({"spec": {"containers": [{"name": "a", "ports": ports}]}})
    assert node.policies
    node.policies.policies = PolicySet((ingress({"ports": [{"port": "http"}]}),))
    async with node.agent():
        node.put_witness()
        node.put_web(spec=spec)
        await asyncio.sleep(1)
        expected = Checks("Ingress", ("shop/p",), Flow("TCP", 65535), Flow("TCP", 8080))
        assert node.tried[0] == expected


async def test_condition_goes_with_the_readiness_gate(node: Node) -> None:
    async with node.agent():
        node.put_witness()
        web = node.put_web()
        await asyncio.sleep(1)
        assert node.found() == PENDING
        web.pod = msgspec.structs.replace(web.pod, awaits_policies=False)
        node.store.desired.mark("uid-web")
        await asyncio.sleep(1)
        tried = node.trials
        await asyncio.sleep(10)
        assert (node.found(), node.trials) == (("", ""), tried)


async def test_pod_that_is_gone_is_in_the_file_no_longer(node: Node) -> None:
    node.shown = IN_FORCE
    async with node.agent():
        node.put_witness()
        node.put_web()
        await asyncio.sleep(2)
        assert "uid-web" in await asyncio.to_thread(node.state.read_text, "utf-8")
        del node.store.pods["uid-web"]
        node.store.in_force.mark("uid-web")
        await asyncio.sleep(2)
        assert "uid-web" not in await asyncio.to_thread(node.state.read_text, "utf-8")
        # Nor does this agent know it.
        node.shown = NOT_IN_FORCE
        node.put_web()
        await asyncio.sleep(2)
        assert node.found() == PENDING


async def test_next_sandbox_of_a_pod_is_checked_instead(node: Node) -> None:
    async with node.agent():
        node.put_witness()
        web = node.put_web()
        await asyncio.sleep(5)
        web.netns = Netns("/run/netns/next", 4, 99)
        node.store.in_force.mark(web.pod.uid)
        await asyncio.sleep(5)
        checks = [task.get_name() for task in asyncio.all_tasks()]
        assert checks.count(f"policies of {web.pod.full_name}") == 1
        node.shown = IN_FORCE
        await asyncio.sleep(2)
        assert node.found() == PROGRAMMED


async def test_check_goes_on_through_changes_of_its_pod(node: Node) -> None:
    node.shown = IN_FORCE
    async with node.agent():
        node.put_witness()
        web = node.put_web()
        for _ in range(40):
            await asyncio.sleep(0.05)
            node.put(web)
        assert node.found() == PROGRAMMED


async def test_checks_and_the_time_to_the_condition_are_counted(node: Node) -> None:
    async with node.agent():
        node.put_witness()
        node.put_web()
        await asyncio.sleep(40)
        before = node.metrics("podgate_policy_checks_total")
        # One may be on its way.
        assert before.keys() == {outcomes.NOT_PROGRAMMED}
        assert before[outcomes.NOT_PROGRAMMED] in (node.trials, node.trials - 1)
        assert node.metrics("podgate_policy_ready_seconds_count") == {"": 0}
        node.shown = IN_FORCE
        await asyncio.sleep(15)
        assert node.metrics("podgate_policy_checks_total") == {
            **before,
            outcomes.PROGRAMMED: 1,
        }
        assert node.metrics("podgate_policy_ready_seconds_count") == {"": 1}
        (seconds,) = node.metrics("podgate_policy_ready_seconds_sum").values()
        assert 40 < seconds < 55
