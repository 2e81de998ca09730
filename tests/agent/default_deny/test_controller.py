"""The controller of the default-deny table: which interfaces it opens, and when."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest

from agent.default_deny import table as default_deny_table
from agent.default_deny.controller import DefaultDenyController
from agent.linux.pod_network import HostInterface
from agent.linux.rtnetlink import Link
from agent.pods.conditions import TRUE, Conditions
from agent.pods.pod import Pod
from agent.pods.pod_state import IsolationStatus
from agent.pods.store import PodStore
from agent.settings import Settings
from bpf.verdicts import Mode
from probes.netns import Netns
from tests import polling
from tests.agent.default_deny.nftables import Nftables, nftables

__all__ = ["nftables"]


class Node:
    """A controller with a store and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = PodStore(Conditions())
        self.controller = DefaultDenyController(self.store, now=lambda: self.now)

    def gate(self, name: str, *ifindexes: int) -> None:
        """The reconciler's pass over a pod."""
        if name not in self.store.pods:
            self.store.set_pod(Pod(uid=name, namespace="tests", name=name))
        state = self.store.pods[name]
        state.status = IsolationStatus(TRUE, "Enforced", "")
        state.gated_netns = Netns(f"/run/netns/{name}", 4, 100)
        state.gates = {ifindex: HostInterface(ifindex, f"veth{ifindex}") for ifindex in ifindexes}
        self.store.in_force.mark(name)

    async def release_unclaimed(self, *veths: int) -> None:
        links = [Link(ifindex, f"veth{ifindex}", kind="veth") for ifindex in veths]
        await self.controller._release_unclaimed([*links, Link(2, "eth0")])

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.controller._follow_pods())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def node(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(default_deny_table, "cgroup2_mount", lambda: tmp_path)
    return Node()


async def test_marks_of_pods_do_not_pile_up_without_a_table(node: Node) -> None:
    task = asyncio.create_task(node.controller.run())
    for number in range(3):
        node.store.in_force.mark(f"pod-{number}")
        await asyncio.sleep(0.01)
        assert node.controller._changes.is_empty
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_audit_removes_the_table_of_an_enforcing_agent(
    node: Node, nftables: Nftables
) -> None:
    await node.controller.open(Settings(mode=Mode.ENFORCE), gated=[7])
    assert nftables.families == {"inet", "bridge"}
    await Node().controller.open(Settings(mode=Mode.AUDIT), gated=[7])
    assert nftables.families == set()


async def test_each_interface_of_a_gated_pod_is_opened_once(node: Node, nftables: Nftables) -> None:
    await node.controller.open(Settings(mode=Mode.ENFORCE), gated=[])
    async with node.following():
        node.gate("web", 7)
        await polling.until("the first", lambda: 7 in nftables.sets["gated"])
        nftables.scripts.clear()
        node.gate("web", 7)
        node.gate("web", 7, 9)
        await polling.until("the second", lambda: 9 in nftables.sets["gated"])
        assert len(nftables.scripts) == 1
        assert "007" not in nftables.scripts[0]


async def test_gates_of_one_pass_are_one_transaction(node: Node, nftables: Nftables) -> None:
    await node.controller.open(Settings(mode=Mode.ENFORCE), gated=[])
    nftables.scripts.clear()
    for number in range(100):
        node.gate(f"pod-{number}", 100 + number)
    async with node.following():
        await polling.until("all", lambda: set(range(100, 200)) <= nftables.sets["gated"])
    assert len(nftables.scripts) == 1


async def test_interface_that_no_pod_claims_is_released_after_ten_seconds(
    node: Node, nftables: Nftables
) -> None:
    await node.controller.open(Settings(mode=Mode.ENFORCE), gated=[])
    node.gate("web", 20)
    node.store.relay_gates[21] = "relay"
    for node.now in (0.0, 5.0, 10.0):
        await node.release_unclaimed(20, 21, 22)
        assert 22 not in nftables.sets["not_pods"]
    node.now = 10.1
    await node.release_unclaimed(20, 21, 22)
    assert nftables.sets["not_pods"] & {20, 21, 22} == {22}


async def test_no_interface_is_released_while_a_pod_waits_for_its_first_pass(
    node: Node, nftables: Nftables
) -> None:
    await node.controller.open(Settings(mode=Mode.ENFORCE), gated=[])
    node.store.set_pod(Pod(uid="late", namespace="tests", name="late"))
    await node.release_unclaimed(20, 21)
    node.now = 11.0
    await node.release_unclaimed(20, 21)
    assert not nftables.sets["not_pods"] & {20, 21}
    node.gate("late", 20)
    await node.release_unclaimed(20, 21)
    node.now = 22.0
    await node.release_unclaimed(20, 21)
    assert nftables.sets["not_pods"] & {20, 21} == {21}


async def test_number_of_a_deleted_interface_is_blocked_again(
    node: Node, nftables: Nftables
) -> None:
    await node.controller.open(Settings(mode=Mode.ENFORCE), gated=[])
    await node.release_unclaimed(22)
    node.now = 11.0
    await node.release_unclaimed(22)
    assert 22 in nftables.sets["not_pods"]
    await node.release_unclaimed()
    assert 22 not in nftables.sets["not_pods"]
    await node.release_unclaimed(22)
    assert 22 not in nftables.sets["not_pods"]
