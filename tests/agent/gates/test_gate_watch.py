"""Lost gates are put back at once; what cannot be repaired is repeated at a pace, in fake time."""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Set
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog.testing

from agent.gates import gate_watch
from agent.gates.chain_changes import POLL_SECONDS
from agent.gates.gate_watch import GateWatch
from agent.gates.lost_filters import LostFilters
from agent.gates.metrics import GateMetrics
from agent.gates.worker import GateWorker
from agent.linux.pod_network import HostInterface
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf.attachment import Attachment
from bpf.errors import AttachError, BpfError, CompileError
from bpf.gates import GateCheck

pytestmark = pytest.mark.looptime

IFINDEX = 7
DEVICE, GONE = 3, 4
DELETED = 8


class HostDevices:
    """Programs on host devices."""

    def __init__(self) -> None:
        self.missing: dict[str, frozenset[int]] = {}
        self.problem = ""
        self.tries = 0

    def lost(self, _: Set[int] | None) -> dict[str, frozenset[int]]:
        return self.missing

    def put_back(self, lost: dict[str, frozenset[int]]) -> dict[int, str]:
        found = {ifindex: self.problem for interfaces in lost.values() for ifindex in interfaces}
        self.tries += len(found)
        if not self.problem:
            self.missing = {}
        return found


class Chains:
    """What the kernel has changed so far."""

    def __init__(self) -> None:
        self.changes = self.reads = 0
        self.is_closed = False

    def state(self) -> bytes:
        self.reads += 1
        return bytes(self.changes)

    def words(self, state: bytes) -> dict[int, int]:
        return {0: len(state)}

    def close(self) -> None:
        self.is_closed = True


class Memory:
    """What compares chains in the kernel."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.expected: list[int] = []
        self._comparisons = 0
        self.is_closed = False

    def fileno(self) -> int:
        return self._fd

    def expect(self, words: dict[int, int]) -> bool:
        self.expected.append(words[0])
        return True

    def comparisons(self) -> int:
        self._comparisons += 1
        return self._comparisons

    def close(self) -> None:
        self.is_closed = True
        os.close(self._fd)


@dataclasses.dataclass
class Node:
    """Gates, the kernel, the worker and what the watch calls."""

    attachment: Attachment = Attachment.TCX
    lost: set[int] = dataclasses.field(default_factory=set)
    displaced: set[int] = dataclasses.field(default_factory=set)
    is_full: bool = False
    is_off: bool = False
    checks: list[Set[int] | None] = dataclasses.field(default_factory=list)
    put_back_at: list[float] = dataclasses.field(default_factory=list)
    reported_lost: list[frozenset[int]] = dataclasses.field(default_factory=list)
    interfaces: set[int] = dataclasses.field(default_factory=lambda: {IFINDEX, DEVICE})
    host_devices: "HostDevices" = dataclasses.field(default_factory=lambda: HostDevices())

    chains: Chains | None = None
    """None: the kernel does not offer their state."""

    memory: Memory | None = None

    memory_error: Exception = dataclasses.field(
        default_factory=lambda: BpfError(errno.EPERM, "opening a clock")
    )

    stops: int = 0

    check_error: OSError | None = None
    """What the next check raises."""

    is_removed: bool = False
    """Whether podgate-cni has removed the gates that are lost."""

    moved: set[int] = dataclasses.field(default_factory=set)
    """Gates that the reconciler has moved first, until a check begins."""

    missing_error: int = errno.ENXIO
    """Of interfaces that cannot be read."""

    put_back_gates: list[set[int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = PodStore(Conditions())
        self.store.set_pod(Pod(uid="web", namespace="demo", name="web"))
        self.store.pods["web"].gates = {IFINDEX: HostInterface(IFINDEX, "veth7")}
        self.store.to_reconcile.take()
        self.metrics = GateMetrics(self.store)
        self.watch = GateWatch(
            cast(GateWorker, self),
            self.store,
            self.metrics,
            on_put_back=self.note_put_back,
            on_lost=self.reported_lost.append,
            is_off=lambda: self.is_off,
            open_chains=self.open_chains,
            open_memory=self.open_memory,
        )

    def name_of(self, ifindex: int) -> str:
        if ifindex not in self.interfaces:
            raise OSError(self.missing_error, os.strerror(self.missing_error))
        return f"veth{ifindex}"

    def note_put_back(self, ifindexes: Collection[int]) -> None:
        self.put_back_at.append(asyncio.get_running_loop().time())
        self.put_back_gates.append({*ifindexes})

    def open_chains(self) -> Any:
        if self.chains is None:
            raise BpfError(errno.EPERM, "loading the program tcx_chains")
        return self.chains

    async def open_memory(self, seconds: float) -> Any:
        assert seconds == POLL_SECONDS
        if self.memory is None:
            raise self.memory_error
        return self.memory

    @property
    def gates(self) -> "Node":
        return self

    async def repair(self, make: functools.partial[LostFilters]) -> "Node":
        self.repaired: Callable[[int], None] = make.keywords["on_put_back"]
        return self

    def stop(self) -> None:
        self.stops += 1

    def take_moved(self) -> set[int]:
        moved, self.moved = self.moved, set()
        return moved

    async def run_check(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def check(self, changed: Set[int] | None) -> GateCheck:
        self.checks.append(changed)
        if error := self.check_error:
            self.check_error = None
            raise error
        return GateCheck(frozenset(self.lost), frozenset(self.displaced))

    def put_back(self, ifindexes: Set[int]) -> dict[int, bool | AttachError]:
        if self.is_full:
            return dict.fromkeys(ifindexes, AttachError("No space left on device"))
        if self.is_removed:
            return dict.fromkeys(ifindexes, False)
        self.lost -= ifindexes
        return dict.fromkeys(ifindexes, True)

    def is_marked(self) -> bool:
        """Whether the pod was marked since the last question."""
        return "web" in self.store.to_reconcile.take()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node()
    monkeypatch.setattr(socket, "if_indextoname", made.name_of)
    # A check takes no time, however late this process gets a processor.
    monkeypatch.setattr(gate_watch, "time", SimpleNamespace(monotonic=lambda: 0.0))
    return made


@contextlib.asynccontextmanager
async def running(node: Node) -> AsyncIterator[None]:
    task = asyncio.create_task(node.watch.run())
    try:
        await asyncio.sleep(0.001)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_gate_that_is_lost_is_back_within_a_tenth_of_a_second(node: Node) -> None:
    async with running(node):
        node.lost.add(IFINDEX)
        lost_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.2)
        assert node.put_back_at[0] - lost_at < 0.1
        assert node.is_marked()
        assert node.reported_lost == []


async def test_gate_that_is_lost_after_a_check_had_to_wait_for_the_kernel_is_back_soon(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs held RTNL for a second."""
    clock = SimpleNamespace(monotonic=functools.partial(next, itertools.count()))
    monkeypatch.setattr(gate_watch, "time", clock)
    async with running(node):
        node.lost.add(IFINDEX)
        lost_at = asyncio.get_running_loop().time()
        await asyncio.sleep(10)
        assert node.put_back_at[0] - lost_at < 0.6


async def test_checks_of_many_chains_leave_the_kernels_lock_to_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=functools.partial(next, itertools.count(1000, 0.004)))
    monkeypatch.setattr(gate_watch, "time", clock)
    async with running(node):
        await asyncio.sleep(10)
        # Each takes 4 ms.
        assert len(node.checks) == pytest.approx(50, abs=2)


async def test_gate_that_is_put_back_without_a_check_is_reported_like_others(node: Node) -> None:
    with structlog.testing.capture_logs() as lines:
        async with running(node):
            node.repaired(IFINDEX)
            assert node.put_back_at == [asyncio.get_running_loop().time()]
            assert node.is_marked()
            await asyncio.sleep(3)
            assert node.stops == 0
    assert node.stops == 1
    assert [line["event"] for line in lines] == [Event.GATE_PUT_BACK]
    assert next(iter(node.metrics.gates_put_back.collect())).samples[0].value == 1


async def test_unchanged_chains_are_not_read_and_a_change_is_noticed_within_a_tenth_of_a_second(
    node: Node,
) -> None:
    node.chains = Chains()
    async with running(node):
        await asyncio.sleep(4)
        assert len(node.checks) == 1
        node.lost.add(IFINDEX)
        node.chains.changes += 1
        lost_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.2)
        assert node.put_back_at[0] - lost_at < 0.1
    assert node.chains.is_closed


async def test_chains_are_compared_by_the_kernel_once_the_agent_has_started(node: Node) -> None:
    node.chains, node.memory = Chains(), Memory()
    async with running(node):
        await asyncio.sleep(4)
        assert node.memory.expected == []
        await asyncio.sleep(4)
        assert node.memory.expected == [0]
        node.chains.reads = 0
        await asyncio.sleep(15)
        assert node.chains.reads == 0
    assert node.memory.is_closed


@pytest.mark.parametrize(
    "error",
    [
        BpfError(errno.ENODEV, "opening a clock"),
        CompileError("bcc is not installed for this Python"),
        OSError(errno.EMFILE, "Too many open files"),
    ],
    ids=repr,
)
async def test_a_change_is_noticed_where_the_kernel_cannot_compare_chains(
    node: Node, error: Exception
) -> None:
    node.memory_error = error
    node.chains = Chains()
    async with running(node):
        await asyncio.sleep(10)
        node.lost.add(IFINDEX)
        node.chains.changes += 1
        await asyncio.sleep(0.2)
        assert len(node.put_back_at) == 1


async def test_gates_without_any_change_are_checked_twice_a_minute(node: Node) -> None:
    node.chains = Chains()
    async with running(node):
        await asyncio.sleep(25)
        assert len(node.checks) == 1
        await asyncio.sleep(50)
        assert len(node.checks) == 3


async def test_chains_are_read_again_and_again_while_a_gate_cannot_be_put_back(node: Node) -> None:
    node.chains = Chains()
    async with running(node):
        node.is_full = True
        node.lost.add(IFINDEX)
        node.chains.changes += 1
        await asyncio.sleep(1)
        node.is_full = False
        mended_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.2)
        assert node.put_back_at[0] - mended_at < 0.1


async def test_each_check_reads_the_chains_once_while_a_gate_is_lost(node: Node) -> None:
    node.chains = Chains()
    async with running(node):
        await asyncio.sleep(1)
        node.is_full = True
        node.lost.add(IFINDEX)
        node.watch.hint({IFINDEX})
        await asyncio.sleep(0.01)
        reads, checks = node.chains.reads, len(node.checks)
        await asyncio.sleep(1)
        assert node.chains.reads - reads == len(node.checks) - checks > 5


async def test_change_of_filters_is_checked_at_once(node: Node) -> None:
    node.attachment = Attachment.CLSACT
    async with running(node):
        node.checks.clear()
        await asyncio.sleep(2)
        assert node.checks == []  # the kernel reports them
        node.watch.hint({IFINDEX})
        await asyncio.sleep(0.001)
        assert node.checks == [{IFINDEX}]


async def test_changes_of_several_interfaces_are_checked_together(node: Node) -> None:
    node.attachment = Attachment.CLSACT
    async with running(node):
        assert node.checks == [None]  # the first one is of all
        node.watch.hint({IFINDEX})
        node.watch.hint({DEVICE})
        await asyncio.sleep(0.001)
        node.watch.hint({IFINDEX})
        node.watch.hint(None)
        node.watch.hint({DEVICE})
        await asyncio.sleep(0.001)
        assert node.checks[1:] == [{IFINDEX, DEVICE}, None]
        await asyncio.sleep(6)
        assert node.checks[3:] == [set()]


async def test_check_that_fails_is_logged_and_made_again_for_all_gates(node: Node) -> None:
    node.attachment = Attachment.CLSACT
    with structlog.testing.capture_logs() as lines:
        async with running(node):
            node.check_error = OSError(errno.ENOBUFS, "No buffer space available")
            node.lost.add(IFINDEX)
            node.watch.hint({IFINDEX})
            await asyncio.sleep(0.5)
            assert node.checks[1:] == [{IFINDEX}, None]
            assert node.put_back_gates == [{IFINDEX}]
    assert [line["event"] for line in lines] == [Event.CHAIN_ORDER_UNKNOWN]


async def test_nothing_is_checked_before_there_is_a_gate(node: Node) -> None:
    gates, node.store.pods["web"].gates = node.store.pods["web"].gates, {}
    async with running(node):
        await asyncio.sleep(10)
        assert node.checks == []
        node.store.pods["web"].gates = gates
        node.store.in_force.mark("web")
        await asyncio.sleep(0.001)
        assert node.checks == [None]


async def test_gate_that_podgate_cni_has_removed_is_neither_put_back_nor_lost(node: Node) -> None:
    node.is_removed = True
    async with running(node):
        node.lost.add(IFINDEX)
        await asyncio.sleep(2)
        assert (node.put_back_at, node.reported_lost) == ([], [])
        assert not node.is_marked()


async def test_gate_that_fails_as_its_interface_is_deleted_is_no_loss(node: Node) -> None:
    node.is_full = True
    async with running(node):
        node.lost.add(IFINDEX)
        node.interfaces.remove(IFINDEX)
        await asyncio.sleep(0.2)
        assert node.reported_lost == []
        assert node.watch.lost == frozenset()


async def test_loss_is_logged_once_a_minute_and_counted_each_time(node: Node) -> None:
    with structlog.testing.capture_logs() as lines:
        async with running(node):
            for _ in range(5):
                node.lost.add(IFINDEX)
                await asyncio.sleep(2)
            # Another minute.
            await asyncio.sleep(60)
            node.lost.add(IFINDEX)
            await asyncio.sleep(2)
    assert [(line["event"], line["pod"], line["ifindex"]) for line in lines] == [
        (Event.GATE_PUT_BACK, "demo/web", IFINDEX)
    ] * 2
    assert next(iter(node.metrics.gates_put_back.collect())).samples[0].value == 6
    assert node.put_back_gates == [{IFINDEX}] * 6


async def test_loss_is_counted_while_it_is_unknown_whether_the_interface_is_there(
    node: Node,
) -> None:
    node.missing_error = errno.EMFILE
    node.interfaces.clear()
    with structlog.testing.capture_logs() as lines:
        async with running(node):
            node.lost.add(IFINDEX)
            await asyncio.sleep(2)
    assert [line["event"] for line in lines] == [Event.GATE_PUT_BACK]


@pytest.mark.parametrize("number", [errno.ENXIO, errno.ENODEV])
async def test_gate_whose_interface_is_deleted_next_is_no_loss(node: Node, number: int) -> None:
    node.missing_error = number
    with structlog.testing.capture_logs() as lines:
        async with running(node):
            node.lost.add(IFINDEX)
            await asyncio.sleep(0.5)
            node.interfaces.clear()
            await asyncio.sleep(2)
    assert lines == []


async def test_gate_that_was_lost_beside_a_deleted_one_is_counted(node: Node) -> None:
    node.store.pods["web"].gates[DELETED] = HostInterface(DELETED, "veth8")
    async with running(node):
        node.lost |= {IFINDEX, DELETED}
        await asyncio.sleep(2)
    assert node.put_back_gates == [{IFINDEX, DELETED}]
    assert next(iter(node.metrics.gates_put_back.collect())).samples[0].value == 1


async def test_gate_that_cannot_be_put_back_is_reported_until_it_can(node: Node) -> None:
    node.is_full = True
    async with running(node):
        node.lost.add(IFINDEX)
        await asyncio.sleep(0.2)
        assert node.reported_lost == [{IFINDEX}]
        assert node.is_marked()
        await asyncio.sleep(3)
        assert not node.is_marked()
        await asyncio.sleep(3)
        assert node.is_marked()
        node.is_full = False
        await asyncio.sleep(0.2)
        assert node.reported_lost == [{IFINDEX}, frozenset()]
        assert node.is_marked()


async def test_gates_that_podgate_off_removes_are_not_put_back(node: Node) -> None:
    """Its mark is there before the modes follow it."""
    node.is_off = True
    async with running(node):
        node.lost.add(IFINDEX)
        await asyncio.sleep(2)
    assert node.put_back_at == []
    assert node.reported_lost == []


async def test_pod_of_a_displaced_gate_is_marked_at_a_pace(node: Node) -> None:
    async with running(node):
        node.displaced.add(IFINDEX)
        await asyncio.sleep(0.2)
        assert node.is_marked()
        await asyncio.sleep(2)
        assert not node.is_marked()
        await asyncio.sleep(5)
        assert node.is_marked()


@pytest.mark.parametrize(
    "error", [None, OSError(errno.ENOBUFS, "No buffer space available")], ids=["", "failed check"]
)
async def test_pod_of_a_gate_that_is_displaced_right_after_its_move_is_marked_at_once(
    node: Node, error: OSError | None
) -> None:
    """Before any check has found it first, and though one failed."""
    async with running(node):
        node.displaced.add(IFINDEX)
        await asyncio.sleep(0.2)
        assert node.is_marked()
        node.moved.add(IFINDEX)
        node.check_error = error
        node.watch.hint({IFINDEX})
        await asyncio.sleep(0.2)
        assert node.is_marked()
        await asyncio.sleep(2)
        assert not node.is_marked()


async def test_gate_that_stays_displaced_is_read_again_without_a_message(node: Node) -> None:
    """A filter, which is read only if the kernel reported a change, or it was not in order."""
    node.displaced.add(IFINDEX)
    async with running(node):
        await asyncio.sleep(0.2)
        assert node.checks[-1] == {IFINDEX}


async def test_program_of_a_host_device_is_put_back_and_logged(node: Node) -> None:
    with structlog.testing.capture_logs() as logged:
        async with running(node):
            node.host_devices.missing = {"bridge_gate": frozenset({DEVICE})}
            await asyncio.sleep(0.2)
            node.host_devices.missing = {"bridge_gate": frozenset({DEVICE})}
            await asyncio.sleep(0.2)
            node.host_devices.missing = {"bridge_gate": frozenset({GONE})}
            await asyncio.sleep(0.2)
            assert node.host_devices.missing == {}
            # Another minute.
            await asyncio.sleep(60)
            node.host_devices.missing = {"bridge_gate": frozenset({DEVICE})}
            await asyncio.sleep(0.2)
    found = [one for one in logged if one["event"] == Event.HOST_DEVICE_PUT_BACK]
    assert [(line["ifindex"], line["problem"]) for line in found] == [(DEVICE, "")] * 2
    assert node.put_back_at == []  # no pod's path changed


async def test_program_of_a_host_device_that_cannot_be_put_back_is_tried_again(
    node: Node,
) -> None:
    node.host_devices.problem = "No space left on device"
    async with running(node):
        node.host_devices.missing = {"bridge_gate": frozenset({DEVICE})}
        await asyncio.sleep(0.2)
        assert node.checks[-1] == {DEVICE}
        node.host_devices.problem = ""
        await asyncio.sleep(0.2)
    assert node.host_devices.missing == {}
    assert node.host_devices.tries > 1


async def test_programs_of_host_devices_are_not_put_back_while_the_node_is_off(node: Node) -> None:
    node.is_off = True
    async with running(node):
        node.host_devices.missing = {"bridge_gate": frozenset({DEVICE})}
        await asyncio.sleep(0.2)
    assert node.host_devices.tries == 0
