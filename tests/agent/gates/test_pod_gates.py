"""The status of one pod's gates, with the real store and reconciler on a node in memory."""

import asyncio
import dataclasses
import errno
import gc
import ipaddress

import msgspec
import pytest
import structlog

from agent.gates import pod_gates
from agent.linux.pod_network import HostInterface, PodNetwork
from agent.logs import Event
from agent.pods import modes
from agent.pods.conditions import FALSE, TRUE
from agent.pods.pod import Pod, Problem
from agent.pods.pod_state import AddressClaims, Admission
from bpf.errors import BpfError
from bpf.gates import GateConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode
from probes.netns import Netns, NetnsError, NetnsGoneError, NetnsUnreadableError
from tests.agent.app.node import BUSY, GONE, Node

pytestmark = pytest.mark.looptime


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


async def settled(node: Node) -> None:
    """A pass over all pods."""
    async with node.running():
        await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [(Mode.AUDIT, "Audit"), (Mode.ENFORCE, "Enforced"), (Mode.STRICT, "Enforced")],
)
async def test_gated_pod_has_the_reason_of_its_mode_and_its_interface(
    node: Node, mode: Mode, reason: str
) -> None:
    node.add("web", 7, mode=mode)
    await settled(node)
    assert node.status("web") == (TRUE, reason)
    assert node.message("web") == "Gate attached to veth7, sandbox net:[1007]."


async def test_message_has_each_problem_of_the_pod_and_its_gate(node: Node) -> None:
    async def admit(pod: Pod) -> Admission:
        return Admission(problem="3 rules do not fit.")

    async def check(pod: Pod, netns: Netns, network: PodNetwork) -> AddressClaims:
        return AddressClaims((), {ipaddress.ip_address("198.18.9.9"): "an address of the node"})

    node.admit, node.check = admit, check  # type: ignore[method-assign]
    node.gates.problem = "No room for 2 addresses."
    node.gates.displaced.add(7)
    node.gates.failing["move first"] = BUSY
    pod = msgspec.structs.replace(
        node.add("web", 7),
        manifest_problem=Problem("InvalidManifest", "The manifest is invalid."),
        mode_problems=(Problem("A", "The mode is limited."), Problem("B", "A label is none.")),
        host_problems=(Problem("C", "A probe has a host."),),
    )
    node.store.set_pod(pod)
    await settled(node)
    assert node.message("web") == (
        "Gate attached to veth7, sandbox net:[1007]. 3 rules do not fit. Addresses that only the "
        "pod itself claims count in its own gate alone: 198.18.9.9 is an address of the node. No "
        "room for 2 addresses. Another program runs before the gate on veth7, and packets it "
        f"accepts pass no gate; the gate cannot be moved ({BUSY}). The manifest is invalid. The "
        "mode is limited. A label is none. A probe has a host."
    )


async def test_gate_has_mode_rules_and_addresses_of_its_pod(node: Node) -> None:
    async def check(pod: Pod, netns: Netns, network: PodNetwork) -> AddressClaims:
        return AddressClaims(network.addresses[:1])

    node.check = check  # type: ignore[method-assign]
    node.rules = (Rule(SourceKind.ANY),)
    node.add("web", 7, mode=Mode.STRICT)
    node.set_addresses("web", "198.18.1.7", "198.18.9.9")
    await settled(node)
    own, claimed = map(ipaddress.ip_address, ("198.18.1.7", "198.18.9.9"))
    assert node.gates.gates == {
        7: GateConfig(Mode.STRICT, (own,), node.rules, claimed=(claimed,), pod="web")
    }


async def test_gate_for_which_the_runtime_waits_precedes_calls_for_other_pods(node: Node) -> None:
    """Such as those of their relays and reply tables."""
    async with node.running():
        await asyncio.sleep(1)
        node.store.awaited.add("web")
        others = [asyncio.create_task(node.worker.run(lambda: None)) for _ in range(200)]
        node.add("web", 7)
        await asyncio.sleep(0.1)
        assert node.status("web") == (TRUE, "Enforced")
        assert not all(other.done() for other in others)
        await asyncio.gather(*others)


async def test_pod_for_which_the_runtime_waits_is_gated_before_a_crowd(node: Node) -> None:
    for number in range(1, 41):
        node.add(f"pod{number}", number)
    node.add("web", 41)
    node.store.awaited.add("web")
    async with node.running():
        await asyncio.sleep(0.1)
        assert node.status("web") == (TRUE, "Enforced")
        assert "install pod40" not in node.gates.calls


async def test_pod_in_mode_off_has_no_gate(node: Node) -> None:
    node.add("web", 7, mode=Mode.OFF)
    await settled(node)
    assert node.status("web") == (TRUE, "Off")
    assert node.gates.gates == {}


async def test_message_of_mode_off_has_the_problems_of_the_pods_mode(node: Node) -> None:
    problems = (Problem("A", "The mode is limited."),)
    node.store.set_pod(
        msgspec.structs.replace(node.add("web", 7, mode=Mode.OFF), mode_problems=problems)
    )
    await settled(node)
    assert node.message("web") == "Mode off: interfaces are not gated. The mode is limited."


@pytest.mark.parametrize(
    ("mode", "kept_up_to", "attached", "expected"),
    [
        (Mode.AUDIT, Mode.STRICT, Mode.ENFORCE, Mode.ENFORCE),
        (Mode.OFF, Mode.ENFORCE, Mode.STRICT, Mode.ENFORCE),
        (Mode.ENFORCE, Mode.STRICT, Mode.ENFORCE, Mode.ENFORCE),
        (Mode.ENFORCE, Mode.STRICT, Mode.AUDIT, Mode.ENFORCE),
        (Mode.AUDIT, Mode.OFF, Mode.STRICT, Mode.AUDIT),
    ],
)
async def test_gate_keeps_its_stricter_mode_while_labels_are_unknown(
    node: Node, mode: Mode, kept_up_to: Mode, attached: Mode, expected: Mode
) -> None:
    node.gates.mode_of = lambda ifindex: attached  # type: ignore[attr-defined]
    pod = node.add("web", 7, mode=mode)
    node.store.set_pod(msgspec.structs.replace(pod, kept_up_to=kept_up_to))
    await settled(node)
    config = node.gates.gates[7]
    assert config is not None
    assert config.mode is expected
    is_kept = expected is not mode
    found = node.store.pods["web"].pod
    assert found.mode_problems == ((modes.kept(expected),) if is_kept else ())
    assert found.kept_up_to is (expected if is_kept else kept_up_to)


async def test_pod_of_the_host_network_has_no_gate(node: Node) -> None:
    node.store.set_pod(msgspec.structs.replace(node.add("web", 7), host_network=True))
    await settled(node)
    assert node.status("web") == (TRUE, "HostNetwork")
    assert node.gates.gates == {}


@pytest.mark.parametrize(
    ("problem", "reason", "message"),
    [
        (None, "NetnsMissing", "The manifest names no network namespace."),
        (Problem("SandboxMissing", "There is no sandbox."), "SandboxMissing", None),
    ],
)
async def test_pod_without_a_namespace_has_the_problem_of_its_manifest(
    node: Node, problem: Problem | None, reason: str, message: str | None
) -> None:
    node.store.set_pod(
        Pod(uid="web", namespace="demo", name="web", mode=Mode.ENFORCE, manifest_problem=problem)
    )
    await settled(node)
    assert node.status("web") == (FALSE, reason)
    assert node.message("web") == (problem.message if problem else message)


def counted(node: Node) -> dict[str, float]:
    """Gates that were attached, lost and not updated, by the metrics."""
    metrics = node.chain_order._metrics
    found = (metrics.attach_seconds, metrics.gates_lost, metrics.gate_updates_failed)
    return {
        sample.name: sample.value
        for metric in found
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith(("_count", "_total"))
    }


ATTACHED = "podgate_gate_attach_duration_seconds_count"
LOST, NOT_UPDATED = "podgate_gates_lost_total", "podgate_gate_updates_failed_total"


async def test_each_gate_is_counted_and_logged_once_when_it_is_attached(node: Node) -> None:
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            for name, ifindex in (("web", 7), ("db", 8)):
                node.add(name, ifindex)
            for _ in range(3):
                node.store.mark("web")
                await asyncio.sleep(1)
    gated = [line for line in lines if line["event"] is Event.INTERFACE_GATED]
    assert [(line["pod"], line["interface"], line["mode"]) for line in gated] == [
        ("demo/web", "veth7", "enforce"),
        ("demo/db", "veth8", "enforce"),
    ]
    assert counted(node)[ATTACHED] == 2


@pytest.mark.parametrize(
    ("is_lost", "problem"),
    [
        (True, f"veth7 lost its gate, which cannot be attached again yet: {BUSY}."),
        (
            False,
            f"The gate keeps its last addresses and rules; it cannot be updated yet: {BUSY}.",
        ),
    ],
    ids=["lost", "not updated"],
)
async def test_gate_that_fails_later_is_counted_and_described(
    node: Node, is_lost: bool, problem: str
) -> None:
    node.add("web", 7)
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            await asyncio.sleep(1)
            node.gates.failing["install"] = BUSY
            if is_lost:
                node.gates.gates.clear()
            node.store.mark("web")
            await asyncio.sleep(0.1)
            assert node.message("web") == f"Gate attached to veth7, sandbox net:[1007]. {problem}"
    event = Event.GATE_LOST if is_lost else Event.GATE_NOT_UPDATED
    times = [line["event"] for line in lines].count(event)
    assert times
    expected = {ATTACHED: 1, LOST: 0, NOT_UPDATED: 0}
    assert counted(node) == {**expected, LOST if is_lost else NOT_UPDATED: times}


async def test_changed_rules_are_written_for_the_pods_that_need_nothing_else(node: Node) -> None:
    node.add("off", 1, mode=Mode.OFF)
    for ifindex, name in enumerate(("lost", "full", "web", "db"), start=2):
        node.add(name, ifindex)
    in_force = node.store.in_force.subscribe()

    def fail(call: str) -> None:
        if call == "configure web":
            raise BpfError(errno.ENOMEM, "Cannot allocate memory")

    async with node.running():
        await asyncio.sleep(2)
        del node.gates.gates[2]
        node.gates.before_call = fail
        node.store.pods["full"].gate_problem = "No room for 2 addresses."
        node.rules = (Rule(SourceKind.ANY),)
        in_force.take()
        node.gates.calls.clear()
        for name in node.store.pods:
            node.store.changed_rules.mark(name)
        await asyncio.sleep(0.02)
        assert node.gates.calls[:1] == ["configure db"]
        await asyncio.sleep(2)
    assert [config and config.rules for config in node.gates.gates.values()] == [node.rules] * 4
    assert {f"install {name}" for name in ("lost", "full", "web")} <= {*node.gates.calls}
    assert "install db" not in node.gates.calls


async def test_pod_whose_mode_and_rules_change_together_gets_a_gate_with_them(node: Node) -> None:
    pod = node.add("web", 7, mode=Mode.OFF)
    async with node.running():
        await asyncio.sleep(1)
        node.rules = (Rule(SourceKind.ANY),)
        node.store.changed_rules.mark("web")
        node.store.set_pod(msgspec.structs.replace(pod, mode=Mode.ENFORCE))
        await asyncio.sleep(1)
    config = node.gates.gates[7]
    assert config is not None
    assert config.rules == node.rules


async def test_pod_that_podgate_cni_has_gated_was_never_without_a_gate(node: Node) -> None:
    node.add("web", 7)
    node.add("db", 8)
    node.gates.gates[8] = None
    await settled(node)
    assert node.store.pods["web"].first_gated_at is not None
    assert node.store.pods["db"].first_gated_at is None


async def test_pod_whose_namespace_is_gone_is_not_isolated(node: Node) -> None:
    node.add("web", 7)
    del node.networks["/run/netns/web"]
    await settled(node)
    assert node.status("web") == (FALSE, "NetnsNotFound")
    assert node.message("web") == "/run/netns/web does not exist."


class Unreadable:
    """In place of `Netns`, for a process without descriptors."""

    @staticmethod
    def open(path: str) -> None:
        raise NetnsUnreadableError(f"{path} cannot be opened now (Too many open files).")


async def test_gated_pod_whose_namespace_cannot_be_read_now_stays_isolated(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = node.add("web", 7)
    async with node.running():
        await asyncio.sleep(1)
        monkeypatch.setattr(pod_gates, "Netns", Unreadable)
        node.store.mark(pod.uid)
        await asyncio.sleep(5)
        assert node.status("web") == (TRUE, "Enforced")
        assert node.gates.gates.keys() == {7}


async def test_new_pod_whose_namespace_cannot_be_read_now_is_gated_when_it_can(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.running():
        with monkeypatch.context() as context:
            context.setattr(pod_gates, "Netns", Unreadable)
            node.add("web", 7)
            await asyncio.sleep(1)
            assert node.status("web") == (FALSE, "GateFailed")
            assert "Too many open files" in node.message("web")
        await asyncio.sleep(2)
        assert node.status("web") == (TRUE, "Enforced")


async def test_path_that_is_no_namespace_is_named(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Invalid:
        @staticmethod
        def open(path: str) -> None:
            raise NetnsError(f"{path} is no network namespace.")

    monkeypatch.setattr(pod_gates, "Netns", Invalid)
    node.add("web", 7)
    await settled(node)
    assert node.status("web") == (FALSE, "NetnsInvalid")
    assert node.message("web") == "/run/netns/web is no network namespace."


async def test_gate_without_room_is_logged_when_it_begins_and_when_it_changes(node: Node) -> None:
    node.add("web", 7)
    node.gates.problem = "no room for 3 of 70 rules"
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            await asyncio.sleep(1)
            for problem in ("no room for 3 of 70 rules", "", "no room for 1 of 68 rules"):
                node.gates.problem = problem
                node.store.mark("web")
                await asyncio.sleep(1)
    logged = [line for line in lines if line["event"] is Event.GATE_HAS_NO_ROOM]
    assert [(line["pod"], line["problem"]) for line in logged] == [
        ("demo/web", "no room for 3 of 70 rules"),
        ("demo/web", "no room for 1 of 68 rules"),
    ]


async def test_lost_gates_are_put_back_before_and_after_each_attach(node: Node) -> None:
    """An attach takes 15 ms."""
    calls = node.gates.calls
    node.gates.breathe = lambda: calls.append("breathe")  # type: ignore[method-assign]
    node.add("web", 7)
    await settled(node)
    at = calls.index("install web")
    assert calls[at - 1 : at + 2] == ["breathe", "install web", "breathe"]


@pytest.mark.parametrize("is_due", [True, False])
async def test_claims_are_logged_when_they_are_due(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_due: bool
) -> None:
    async def check(pod: Pod, netns: Netns, network: PodNetwork) -> AddressClaims:
        return claims

    claims = AddressClaims((), {ipaddress.ip_address("198.18.9.9"): "an address of the node"})
    node.check = check  # type: ignore[method-assign]
    monkeypatch.setattr(node, "is_due", lambda uid, found: is_due and found is claims)
    node.add("web", 7)
    with structlog.testing.capture_logs() as lines:
        await settled(node)
    logged = {
        (line["pod"], line["problem"])
        for line in lines
        if line["event"] is Event.ADDRESSES_UNCONFIRMED
    }
    assert logged == ({("demo/web", claims.problem)} if is_due else set())


async def test_gate_that_is_displaced_again_is_logged_again(node: Node) -> None:
    node.add("web", 7)
    node.gates.failing["move first"] = BUSY
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            for displaced in ({7}, {7}, set[int](), {7}):
                node.gates.displaced = displaced
                node.store.mark("web")
                await asyncio.sleep(1)
    assert [line["event"] for line in lines].count(Event.GATE_DISPLACED) == 2


async def test_all_interfaces_of_a_pod_are_gated(node: Node) -> None:
    node.add("web", 7)
    network = node.networks["/run/netns/web"]
    interfaces = (*network.interfaces, HostInterface(9, "veth9"))
    node.networks["/run/netns/web"] = dataclasses.replace(network, interfaces=interfaces)
    node.gates.displaced = {9}
    await settled(node)
    assert node.message("web") == "Gate attached to veth7, veth9, sandbox net:[1007]."
    assert node.gates.links == {7, 9}
    assert node.gates.displaced == set()


async def test_interface_that_never_exists_is_a_failure_after_a_second_try(node: Node) -> None:
    async def exists(ifindex: int) -> bool:
        return False

    node.exists = exists  # type: ignore[method-assign]
    node.gates.failing["install"] = GONE
    node.add("web", 7)
    async with node.running():
        await asyncio.sleep(0.05)
    assert node.status("web") == (FALSE, "GateFailed")
    assert node.message("web") == f"{GONE}."


async def test_pod_whose_network_is_gone_holds_up_no_other_that_is_read_beside_it(
    node: Node,
) -> None:
    node.read_seconds = 0.5
    names = [f"pod{number}" for number in range(1, 9)]
    for number, name in enumerate(names, start=1):
        node.add(name, number)
    del node.networks["/run/netns/pod3"]
    await settled(node)
    found = {name: node.status(name) for name in names}
    assert found.pop("pod3") == (FALSE, "NetnsNotFound")
    assert set(found.values()) == {(TRUE, "Enforced")}


async def test_pod_without_an_interface_waits_for_one(node: Node) -> None:
    path = node.add_netns("web", ifindex=7, has_veth=False)
    node.store.set_pod(
        Pod(uid="web", namespace="demo", name="web", mode=Mode.ENFORCE, netns_path=path)
    )
    await settled(node)
    assert node.status("web") == (FALSE, "NoInterface")


async def test_pod_with_an_interface_that_cannot_be_gated_is_not_supported(node: Node) -> None:
    node.add("web", 7)
    network = node.networks["/run/netns/web"]
    problems = ("eth1 is a macvlan", "eth2 is a device of the host")
    node.networks["/run/netns/web"] = dataclasses.replace(network, unsupported=problems)
    await settled(node)
    assert node.status("web") == (TRUE, "NotSupported")
    assert node.message("web") == "eth1 is a macvlan; eth2 is a device of the host."
    # What can be gated is.
    assert set(node.gates.gates) == {7}


async def test_network_that_is_gone_with_its_pod_is_no_error(node: Node) -> None:
    """It is read beside another one's, and the pod is removed before its own pass."""
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: problems.append(context["message"])
    )

    def remove(call: str) -> None:
        if call == "install web":
            node.store.remove_pod("gone")

    read = node.read

    async def interrupted(netns: Netns) -> PodNetwork:
        if netns.path.endswith("web"):
            return await read(netns)
        try:
            await asyncio.sleep(100)
        finally:
            raise NetnsGoneError("/run/netns/gone does not exist.")

    node.gates.before_call = remove
    node.read = interrupted  # type: ignore[method-assign]
    node.add("web", 7)
    node.add("gone", 8)
    with structlog.testing.capture_logs() as lines:
        await settled(node)
    gc.collect()
    assert problems == []
    assert [line["event"] for line in lines if line["log_level"] != "info"] == []
    assert node.gates.gates.keys() == {7}


async def test_problem_of_one_interface_is_shown_beside_others_without(node: Node) -> None:
    def fill(call: str) -> None:
        node.gates.problem = "No room for 2 addresses." if call == "install web" else ""
        if call == "move first web":
            raise BUSY

    node.gates.before_call = fill
    node.add("web", 7)
    network = node.networks["/run/netns/web"]
    interfaces = (*network.interfaces, HostInterface(9, "veth9"))
    node.networks["/run/netns/web"] = dataclasses.replace(network, interfaces=interfaces)
    # Only the gate on veth9 can be moved.
    node.gates.displaced = {7, 9}
    await settled(node)
    assert node.gates.displaced == {7}
    message = node.message("web")
    assert message.startswith(
        "Gate attached to veth7, veth9, sandbox net:[1007]. No room for 2 addresses. Another "
        "program runs before the gate on veth7,"
    )


async def test_displaced_gate_of_a_later_pod_at_the_same_interface_is_logged(node: Node) -> None:
    node.gates.failing["move first"] = BUSY
    node.gates.displaced = {7}
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            for name in ("web", "db"):
                node.add(name, 7)
                await asyncio.sleep(1)
                node.remove(name)
                await asyncio.sleep(2)
    assert [line["event"] for line in lines].count(Event.GATE_DISPLACED) == 2
