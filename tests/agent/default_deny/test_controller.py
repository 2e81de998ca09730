"""The controller of the default-deny table: which interfaces it opens, and when."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Collection

import pytest
import structlog.testing

from agent import labels
from agent.default_deny import controller
from agent.default_deny import table as default_deny_table
from agent.default_deny.controller import DefaultDenyController
from agent.kubelet.search import KubeletCgroup
from agent.linux import nft, rtnetlink
from agent.linux.pod_network import HostInterface
from agent.linux.rtnetlink import Link
from agent.logs import Event
from agent.pods.conditions import TRUE, Conditions
from agent.pods.pod import Pod
from agent.pods.pod_modes import PodModes
from agent.pods.pod_state import IsolationStatus
from agent.pods.store import PodStore
from bpf.verdicts import Mode
from probes.netns import Netns
from tests import polling
from tests.agent.default_deny.nftables import Nftables, nftables

__all__ = ["nftables"]


class Node:
    """A controller with a store and a clock."""

    def __init__(self, mode: Mode = Mode.ENFORCE, *, has_labels: bool = True) -> None:
        self.now = 0.0
        self.store = PodStore(Conditions())
        self.modes = PodModes(mode, is_complete=has_labels)
        self.lost: set[int] = set()
        """Interfaces without the gate that the reconciler has attached."""
        self.searched: list[set[int]] = []
        """Interfaces for whose gates was searched."""
        self.is_off = False
        """Whether the node has the mark, which the modes follow later."""
        self.read_at: float | None = None
        """When the source has read all pods last; None: it reads them all the time."""
        self.requests: list[float] = []
        """When it was requested to."""
        self.controller = DefaultDenyController(
            self.store,
            self.modes,
            self.find_lost,
            is_off=lambda: self.is_off,
            pods_read_at=lambda: self.now if self.read_at is None else self.read_at,
            request_read=lambda: self.requests.append(self.now),
            now=lambda: self.now,
        )

    async def find_lost(self, ifindexes: Collection[int]) -> set[int]:
        self.searched.append(set(ifindexes))
        return self.lost & set(ifindexes)

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


async def test_marks_of_pods_do_not_pile_up_without_a_table() -> None:
    node = Node(Mode.AUDIT)
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
    await node.controller.open(gated=[7])
    assert nftables.families == {"inet", "bridge"}
    await Node(Mode.AUDIT).controller.open(gated=[7])
    assert nftables.families == set()


async def test_table_of_a_previous_agent_stays_until_labels_are_listed(
    node: Node, nftables: Nftables
) -> None:
    """The node's label may be its reason, and pods started while no agent ran."""
    await node.controller.open(gated=[7])
    nftables.sets["gated"].add(8)
    later = Node(Mode.AUDIT, has_labels=False)
    await later.controller.open(gated=[7])
    assert nftables.families == {"inet", "bridge"}
    later.modes.complete()
    await later.controller._follow_default()
    assert nftables.families == set()


async def test_without_a_previous_table_unknown_labels_install_none(
    node: Node, nftables: Nftables
) -> None:
    later = Node(Mode.AUDIT, has_labels=False)
    await later.controller.open(gated=[7])
    assert nftables.families == set()


@pytest.mark.parametrize("error", [nft.NftError("no permission"), TimeoutError()], ids=repr)
async def test_tables_that_cannot_be_listed_are_none_of_a_previous_agent(
    node: Node, nftables: Nftables, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fail(*arguments: str) -> str:
        raise error

    await node.controller.open(gated=[])
    monkeypatch.setattr(nft, "query", fail)
    later = Node(Mode.AUDIT, has_labels=False)
    await later.controller.open(gated=[7])
    assert (later.controller.is_installed, later.controller.is_desired) == (False, False)


async def test_labels_of_the_node_install_and_remove_the_table(
    node: Node, nftables: Nftables
) -> None:
    node = Node(Mode.AUDIT)
    await node.controller.open(gated=[])
    node.gate("web", 7)
    node.modes.set_namespace("shop", {labels.MODE_LABEL: "strict"})
    await node.controller._follow_default()
    # It cannot know the namespaces of new interfaces.
    assert nftables.families == set()

    node.modes.set_node({labels.MODE_LABEL: "enforce"})
    await node.controller._follow_default()
    assert nftables.families == {"inet", "bridge"}
    assert 7 in nftables.sets["gated"]
    node.modes.set_node({labels.MODE_LABEL: "enforce", labels.MAX_MODE_LABEL: "audit"})
    await node.controller._follow_default()
    assert nftables.families == set()
    node.modes.set_node({labels.MODE_LABEL: "strict"})
    await node.controller._follow_default()
    async with node.following():
        node.gate("late", 9)
        await polling.until("its gate", lambda: {7, 9} <= nftables.sets["gated"])


async def test_each_interface_of_a_gated_pod_is_opened_once(node: Node, nftables: Nftables) -> None:
    await node.controller.open(gated=[])
    async with node.following():
        node.gate("web", 7)
        await polling.until("the first", lambda: 7 in nftables.sets["gated"])
        nftables.scripts.clear()
        node.gate("web", 7)
        node.gate("web", 7, 9)
        await polling.until("the second", lambda: 9 in nftables.sets["gated"])
        assert len(nftables.scripts) == 1
        assert "007" not in nftables.scripts[0]
        node.gate("web", 7, 9)
        await polling.until("another pass", lambda: node.controller._changes.is_empty)
        await node.controller.opened(node.store.pods["web"])
        assert node.searched == [{7}, {9}]


async def test_gates_of_one_pass_are_one_transaction(node: Node, nftables: Nftables) -> None:
    await node.controller.open(gated=[])
    nftables.scripts.clear()
    for number in range(100):
        node.gate(f"pod-{number}", 100 + number)
    async with node.following():
        await polling.until("all", lambda: set(range(100, 200)) <= nftables.sets["gated"])
    assert len(nftables.scripts) == 1


async def test_table_blocks_a_pod_until_the_transaction_with_its_gates_is_finished(
    node: Node, nftables: Nftables
) -> None:
    """A path test must not take the table's drops for those of a CNI."""
    await node.controller.open(gated=[])
    node.gate("web", 7)
    web = node.store.pods["web"]
    async with asyncio.timeout(polling.PATIENCE_SECONDS), node.following():
        await node.controller.opened(web)
        assert 7 in nftables.sets["gated"]
        node.gate("web", 7, 9)
        await node.controller.opened(web)
        assert 9 in nftables.sets["gated"]


async def test_nothing_waits_for_the_table_of_a_removed_pod(node: Node, nftables: Nftables) -> None:
    await node.controller.open(gated=[])
    node.gate("web", 7)
    web = node.store.pods["web"]
    waiting = asyncio.create_task(node.controller.opened(web))
    await asyncio.sleep(0)
    assert not waiting.done()
    node.store.remove_pod("web")
    async with asyncio.timeout(polling.PATIENCE_SECONDS), node.following():
        await waiting


async def test_table_that_cannot_be_changed_counts_as_another_rule_set(
    node: Node, nftables: Nftables
) -> None:
    """That is logged; path tests show the consequence."""
    await node.controller.open(gated=[])
    nftables.failures = [nft.NftError("Could not process rule")] * 9
    node.gate("web", 7)
    async with asyncio.timeout(polling.PATIENCE_SECONDS), node.following():
        await node.controller.opened(node.store.pods["web"])
    assert 7 not in nftables.sets["gated"]


async def test_without_a_table_no_pod_is_blocked() -> None:
    node = Node(Mode.AUDIT)
    node.gate("web", 7)
    async with asyncio.timeout(polling.PATIENCE_SECONDS):
        await node.controller.opened(node.store.pods["web"])


async def test_interface_that_no_pod_claims_is_released_after_ten_seconds(
    node: Node, nftables: Nftables
) -> None:
    await node.controller.open(gated=[])
    node.gate("web", 20)
    node.store.relay_gates[21] = "relay"
    for node.now in (0.0, 5.0, 10.0):
        await node.release_unclaimed(20, 21, 22)
        assert 22 not in nftables.sets["not_pods"]
    node.now = 10.1
    await node.release_unclaimed(20, 21, 22)
    assert nftables.sets["not_pods"] & {20, 21, 22} == {22}


async def test_no_interface_is_released_while_the_pods_cannot_be_read(
    node: Node, nftables: Nftables
) -> None:
    """It may be a new pod's: the runtime hangs, or the component that follows it fails."""
    await node.controller.open(gated=[])
    node.now = 5.0
    await node.release_unclaimed(22)
    for node.now, node.read_at in ((16.0, 4.0), (60.0, 6.0), (600.0, 14.9)):
        await node.release_unclaimed(22)
        assert 22 not in nftables.sets["not_pods"]
        assert node.requests[-1] == node.now
    node.read_at = 600.1
    await node.release_unclaimed(22)
    assert 22 in nftables.sets["not_pods"]


async def test_no_interface_is_released_while_a_pod_waits_for_its_first_pass(
    node: Node, nftables: Nftables
) -> None:
    await node.controller.open(gated=[])
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
    await node.controller.open(gated=[])
    await node.release_unclaimed(22)
    node.now = 11.0
    await node.release_unclaimed(22)
    assert 22 in nftables.sets["not_pods"]
    await node.release_unclaimed()
    assert 22 not in nftables.sets["not_pods"]
    await node.release_unclaimed(22)
    assert 22 not in nftables.sets["not_pods"]


async def test_new_tables_have_nothing_of_the_removed_ones(node: Node, nftables: Nftables) -> None:
    """Neither released interfaces nor the time since when others are unclaimed."""
    await node.controller.open(gated=[])
    await node.release_unclaimed(21)
    node.now = 11.0
    await node.release_unclaimed(21, 22)
    assert nftables.sets["not_pods"] == {1, 2, 7, 8, 21}
    node.modes.set_node({labels.MAX_MODE_LABEL: "audit"})
    await node.controller._follow_default()
    assert nftables.families == set()
    node.modes.set_node({})
    await node.controller._follow_default()
    assert nftables.sets["not_pods"] == {1, 2, 7, 8}
    node.now = 22.0
    await node.release_unclaimed(21, 22)
    assert nftables.sets["not_pods"] == {1, 2, 7, 8}
    node.now = 33.0
    await node.release_unclaimed(21, 22)
    assert nftables.sets["not_pods"] == {1, 2, 7, 8, 21, 22}


async def test_gate_that_is_attached_while_tables_are_installed_is_in_them(
    nftables: Nftables, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(Mode.AUDIT)
    await node.controller.open(gated=[])
    apply = nftables.apply

    async def gate_meanwhile(script: str, *, only_check: bool = False) -> None:
        await apply(script, only_check=only_check)
        if "late" not in node.store.pods:
            node.gate("late", 9)
            await polling.until("its pass", lambda: node.controller._changes.is_empty)

    monkeypatch.setattr(nft, "apply", gate_meanwhile)
    async with node.following():
        node.gate("web", 7)
        await polling.until("its pass", lambda: node.controller._changes.is_empty)
        node.modes.set_node({labels.MODE_LABEL: "enforce"})
        await node.controller._follow_default()
        await polling.until("both gates", lambda: {7, 9} <= nftables.sets["gated"])


async def test_changed_default_is_followed_while_running(node: Node, nftables: Nftables) -> None:
    later = Node(Mode.AUDIT)
    task = asyncio.create_task(later.controller.run())
    await asyncio.sleep(0)
    assert nftables.families == set()
    later.modes.set_node({labels.MODE_LABEL: "enforce"})
    await polling.until("the tables", lambda: nftables.families == {"inet", "bridge"})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


KUBELET = KubeletCgroup("/kubelet.slice", 7, False, 42)


@contextlib.asynccontextmanager
async def kept(
    node: Node, monkeypatch: pytest.MonkeyPatch, cgroups: pathlib.Path, *veths: int
) -> AsyncIterator[list[float]]:
    """The controller runs, on a host with these interfaces of pods. Yields when it has read
    them."""
    reads: list[float] = []

    async def read() -> list[Link]:
        reads.append(node.now)
        return [Link(ifindex, f"veth{ifindex}", kind="veth") for ifindex in veths]

    monkeypatch.setattr(rtnetlink, "read", read)
    (cgroups / "kubelet.slice").mkdir()
    task = asyncio.create_task(node.controller.run())
    try:
        yield reads
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_links_are_read_when_they_or_the_tables_may_have_changed(
    node: Node, nftables: Nftables, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.controller.open(gated=[])
    async with kept(node, monkeypatch, tmp_path) as reads:

        async def admitted() -> None:
            """A pass for another reason."""
            count = len(nftables.scripts)
            node.controller.set_kubelet(KUBELET, has_cgroup=True)
            await polling.until("the kubelet", lambda: len(nftables.scripts) > count)
            await asyncio.sleep(0.02)

        await admitted()
        await admitted()
        assert len(reads) == 1
        node.controller.hint_links()
        await polling.until("a second read", lambda: len(reads) == 2)
        await admitted()
        assert len(reads) == 2
        node.controller.hint_deleted(None)
        await polling.until("a third read", lambda: len(reads) == 3)
        await admitted()
        assert len(reads) == 3
        node.now = 30.0
        await admitted()
        assert reads == [0.0, 0.0, 0.0, 30.0]


@pytest.mark.parametrize(
    ("deleted", "is_read"),
    [
        ({("podgate", "")}, True),
        ({("filter", "input"), ("podgate", "opening")}, True),
        ({("podgate", "kubelet")}, False),
        ({("filter", ""), ("filter", "opening")}, False),
        (set(), False),
    ],
)
async def test_tables_are_compared_after_something_of_them_was_deleted(
    node: Node,
    nftables: Nftables,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    deleted: set[tuple[str, str]],
    is_read: bool,
) -> None:
    await node.controller.open(gated=[])
    async with kept(node, monkeypatch, tmp_path) as reads:
        await polling.until("the first pass", lambda: len(nftables.scripts) > 1)
        await asyncio.sleep(0.02)
        nftables.flush()
        node.controller.hint_deleted(deleted)
        if is_read:
            await polling.until("the tables", lambda: nftables.families == {"inet", "bridge"})
        else:
            await asyncio.sleep(0.02)
            assert nftables.families == set()
        assert len(reads) == 1 + is_read


async def test_interface_of_a_removed_pod_may_be_unclaimed(
    node: Node, nftables: Nftables, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.controller.open(gated=[])
    async with kept(node, monkeypatch, tmp_path, 22) as reads:
        node.gate("web", 22)
        await polling.until("its gate", lambda: 22 in nftables.sets["gated"])
        await asyncio.sleep(0.02)
        count = len(reads)
        node.store.remove_pod("web")
        await polling.until("another read", lambda: len(reads) > count)
        node.now = 10.1
        node.controller.hint_links()
        await polling.until("its release", lambda: 22 in nftables.sets["not_pods"])
        # As a static pod that the kubelet starts again.
        node.gate("web", 22)
        await node.controller.opened(node.store.pods["web"])
        assert 22 in nftables.sets["gated"]
        assert 22 not in nftables.sets["not_pods"]


async def test_only_pods_whose_gates_are_lost_or_back_change(node: Node) -> None:
    for name, ifindex in (("web", 7), ("shop", 8), ("lab", 9)):
        node.gate(name, ifindex)
    marked = node.controller._changes
    marked.take()
    node.controller.set_lost(frozenset({7, 8}))
    assert sorted(marked.take()) == ["shop", "web"]
    node.controller.set_lost(frozenset({8, 9}))
    assert sorted(marked.take()) == ["lab", "web"]


async def test_lost_gates_change_nothing_without_a_table() -> None:
    node = Node(Mode.AUDIT)
    async with node.following():
        node.gate("web", 7)
        await polling.until("its pass", lambda: node.controller._changes.is_empty)
        node.controller.set_lost(frozenset({7}))
        await polling.until("its pass", lambda: node.controller._changes.is_empty)
        node.gate("late", 8)
        await polling.until("the next pass", lambda: node.controller._changes.is_empty)
    assert node.searched == []


async def test_tables_are_compared_every_thirty_seconds(
    node: Node, nftables: Nftables, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a message."""
    await node.controller.open(gated=[])
    async with kept(node, monkeypatch, tmp_path):
        await polling.until("the first pass", lambda: len(nftables.scripts) > 1)
        nftables.flush()
        node.now = 29.9
        node.controller.hint_links()
        await asyncio.sleep(0.02)
        node.now = 30.0
        node.controller.hint_links()
        await polling.until("the tables", lambda: nftables.families == {"inet", "bridge"})


async def test_unclaimed_interface_is_released_while_running(
    node: Node, nftables: Nftables, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.controller.open(gated=[])
    async with kept(node, monkeypatch, tmp_path, 22):
        node.controller.set_kubelet(KUBELET, has_cgroup=True)
        await polling.until("the kubelet", lambda: "kubelet.slice" in nftables.kubelet)
        assert 22 not in nftables.sets["not_pods"]
        node.now = 11.0
        node.controller.set_kubelet(KUBELET, has_cgroup=True)
        await polling.until("its release", lambda: 22 in nftables.sets["not_pods"])


async def test_table_that_podgate_off_removes_is_not_put_back(
    node: Node, nftables: Nftables, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mark is there before the modes follow it."""
    await node.controller.open(gated=[])
    async with kept(node, monkeypatch, tmp_path):
        node.controller.set_kubelet(KUBELET, has_cgroup=True)
        await polling.until("the kubelet", lambda: "kubelet.slice" in nftables.kubelet)
        await asyncio.sleep(0.1)
        node.is_off = True
        nftables.flush()
        node.controller.hint_deleted(None)
        await asyncio.sleep(0.1)
        assert not nftables.families
        node.is_off = False
        node.controller.hint_deleted(None)
        await polling.until("the tables", lambda: nftables.families == {"inet", "bridge"})


async def test_new_table_admits_the_kubelet(
    node: Node, nftables: Nftables, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.controller.open(gated=[])
    async with kept(node, monkeypatch, tmp_path):
        node.controller.set_kubelet(KUBELET, has_cgroup=True)
        await polling.until("the kubelet", lambda: "kubelet.slice" in nftables.kubelet)
        node.modes.set_node({labels.MAX_MODE_LABEL: "audit"})
        await polling.until("no tables", lambda: not nftables.families)
        nftables.kubelet = ""
        node.modes.set_node({})
        await polling.until("the kubelet again", lambda: "kubelet.slice" in nftables.kubelet)


async def test_kubelet_that_ended_stays_admitted_until_another_is_found(
    node: Node, nftables: Nftables, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    await node.controller.open(gated=[])
    async with kept(node, monkeypatch, tmp_path, 22):
        node.controller.set_kubelet(KUBELET, has_cgroup=True)
        await polling.until("the kubelet", lambda: "kubelet.slice" in nftables.kubelet)
        node.controller.set_kubelet(None, has_cgroup=True)
        node.now = 11.0
        await polling.until("a pass", lambda: 22 in nftables.sets["not_pods"])
        assert "kubelet.slice" in nftables.kubelet
        node.controller.set_kubelet(None, has_cgroup=False)
        await polling.until("none", lambda: "kubelet.slice" not in nftables.kubelet)


async def test_interface_whose_gate_is_not_in_force_stays_blocked(
    node: Node, nftables: Nftables
) -> None:
    await node.controller.open(())
    node.lost = {12}
    async with node.following():
        node.gate("a", 12)
        node.gate("b", 13)
        await polling.until("b's gate in the table", lambda: 13 in nftables.sets["gated"])
        assert 12 not in nftables.sets["gated"]
        node.lost = set()
        node.gate("a", 12)
        await polling.until("a's gate in the table", lambda: 12 in nftables.sets["gated"])


async def test_interface_whose_gate_is_lost_is_blocked_again_until_it_is_back(
    node: Node, nftables: Nftables
) -> None:
    await node.controller.open(())
    async with node.following():
        node.gate("a", 12)
        await polling.until("the gate in the table", lambda: 12 in nftables.sets["gated"])
        node.controller.set_lost(frozenset({12}))
        await polling.until("the interface blocked", lambda: 12 not in nftables.sets["gated"])
        node.controller.set_lost(frozenset())
        await polling.until("the gate in the table", lambda: 12 in nftables.sets["gated"])


@pytest.mark.parametrize("error", [OSError("no buffer"), TimeoutError("no answer")])
async def test_gates_whose_order_cannot_be_read_open_their_interfaces(
    node: Node, nftables: Nftables, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fail(ifindexes: Collection[int]) -> set[int]:
        raise error

    monkeypatch.setattr(node.controller, "_find_lost", fail)
    with structlog.testing.capture_logs() as logs:
        assert await node.controller._without_gate({7}) == set()
    assert [(one["event"], one["error"]) for one in logs] == [
        (Event.CHAIN_ORDER_UNKNOWN, str(error))
    ]


@pytest.mark.parametrize("error", [OSError("no buffer"), TimeoutError("no answer")])
async def test_table_that_cannot_be_removed_is_logged(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fail() -> None:
        raise error

    monkeypatch.setattr(default_deny_table, "remove", fail)
    with structlog.testing.capture_logs() as logs:
        await controller._remove_quietly()
    assert [(one["event"], one["error"]) for one in logs] == [
        (Event.DEFAULT_DENY_NOT_REMOVED, str(error))
    ]
