"""The status of one pod's gates, with the real store and reconciler on a node in memory."""

import asyncio
import dataclasses

import pytest
import structlog

from agent.gates import pod_gates
from agent.logs import Event
from agent.pods.conditions import FALSE, TRUE
from agent.pods.pod import Pod
from bpf.verdicts import Mode
from probes.netns import NetnsError, NetnsUnreadableError
from tests.agent.app.node import Node

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
    assert "veth7" in node.message("web")


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
            for problem in ("no room for 3 of 70 rules", "", "no room for 1 of 68 rules"):
                node.gates.problem = problem
                for _ in range(2):
                    node.store.mark("web")
                    await asyncio.sleep(1)
    logged = [line for line in lines if line["event"] is Event.GATE_HAS_NO_ROOM]
    assert [(line["pod"], line["problem"]) for line in logged] == [
        ("demo/web", "no room for 3 of 70 rules"),
        ("demo/web", "no room for 1 of 68 rules"),
    ]


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
