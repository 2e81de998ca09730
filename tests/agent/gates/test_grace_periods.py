"""When grace periods end, with the real store and reconciler on a node in memory, in fake time."""

import asyncio
import contextlib
import dataclasses
import errno
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest
import structlog.testing

from agent.gates import pending_flows
from agent.gates.pending_flows import PendingFlows
from agent.linux.pod_network import HostInterface
from agent.logs import Event
from agent.pods.pod_state import PodState
from bpf.errors import AttachError
from bpf.replies import ReplyFlow
from probes.netns import Netns, NetnsGoneError
from tests.agent.app.node import BUSY, Node

pytestmark = pytest.mark.looptime

READY, STARTED = Event.REPLY_TABLE_READY, Event.GRACE_PERIOD_STARTED
FLOW = ReplyFlow(
    *(socket.IPPROTO_UDP, ipaddress.ip_address("198.18.1.7"), 40000),
    *(ipaddress.ip_address("198.18.9.9"), 53),
)


class Grace:
    """A node, and when its pods' grace periods were to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = Node(monkeypatch)
        self.has_room = True
        self.fill_error: OSError | None = None
        self.pending: Callable[[], PendingFlows] = lambda: PendingFlows((), "")
        self.filled: list[tuple[int, int]] = []
        """Interface, and the number of flows in its table."""
        self.ends: list[tuple[int, int]] = []
        """Interface, and nanoseconds from then on; 0: at once."""
        self.endless: set[int] = set()
        """Interfaces whose grace periods cannot be ended."""
        self.failed: list[Event] = []
        """What was logged as a failure."""
        gates = self.node.gates
        self.reads = 0
        self.in_force = self.node.store.in_force.subscribe()
        monkeypatch.setattr(pending_flows, "read", lambda netns, network: self._read())
        monkeypatch.setattr(gates, "fill_reply_table", self._fill)
        monkeypatch.setattr(gates, "end_grace", self._end)

    def _read(self) -> PendingFlows:
        self.reads += 1
        return self.pending()

    def _fill(self, ifindex: int, flows: tuple[ReplyFlow, ...]) -> bool:
        if self.fill_error:
            raise self.fill_error
        self.filled.append((ifindex, len(flows)))
        return self.has_room

    def _end(self, ifindex: int, at_ns: int) -> None:
        if ifindex in self.endless:
            raise OSError("no map")
        self.in_force.take()
        seconds = (at_ns - time.monotonic_ns()) / 1e9
        self.ends.append((ifindex, round(seconds) if at_ns else 0))

    def ended(self) -> list[int]:
        """Interfaces, sorted: threads read the sockets of a batch side by side."""
        return sorted(ifindex for ifindex, _ in self.ends)

    @contextlib.asynccontextmanager
    async def filling(self) -> AsyncIterator[None]:
        """Fill reply tables, and reconcile nothing."""
        task = asyncio.create_task(self.node.grace_periods.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def run(self) -> list[tuple[object, str, str, int, str]]:
        """Event, pod, interface, flows and reason of what is logged about reply tables."""
        with structlog.testing.capture_logs() as lines:
            async with self.node.running():
                await asyncio.sleep(8)
        self.failed = [line["event"] for line in lines if line["log_level"] in ("warning", "error")]
        return [
            (line["event"], line["pod"], line["interface"], line["flows"], line["reason"])
            for line in lines
            if line["event"] in (READY, STARTED)
        ]


@pytest.fixture
def grace(monkeypatch: pytest.MonkeyPatch) -> Grace:
    made = Grace(monkeypatch)
    made.node.add("web", 7)
    return made


async def test_it_ends_at_once_where_no_other_flows_may_wait(grace: Grace) -> None:
    grace.pending = lambda: PendingFlows((FLOW, FLOW), "")
    assert await grace.run() == [(READY, "demo/web", "veth7", 2, "")]
    assert (grace.filled, grace.ends, grace.failed) == ([(7, 2)], [(7, 0)], [])
    # What is in force changed once more.
    assert grace.in_force.take() == ["web"]


def unread() -> PendingFlows:
    raise OSError("no netlink")


def slow() -> PendingFlows:
    raise TimeoutError


def gone() -> PendingFlows:
    raise NetnsGoneError("/run/netns/web does not exist.")


@pytest.mark.parametrize(
    ("pending", "has_room", "reason"),
    [
        (lambda: PendingFlows((FLOW,), "1 sockets of RAW"), True, "1 sockets of RAW"),
        (lambda: PendingFlows((FLOW,), "1 sockets of RAW"), False, "1 sockets of RAW"),
        (lambda: PendingFlows((FLOW,), ""), False, "the reply table is full"),
        (unread, True, "no netlink"),
        (slow, True, "sockets not read in 5 s"),
        (gone, True, "/run/netns/web does not exist."),
    ],
    ids=["unknown", "unknown and full", "full", "unread", "slow", "gone"],
)
async def test_it_lasts_for_longer_where_there_may_be_more_flows(
    grace: Grace, pending: Callable[[], PendingFlows], has_room: bool, reason: str
) -> None:
    grace.pending, grace.has_room = pending, has_room
    flows = 1 if reason.endswith(("RAW", "full")) else 0
    assert await grace.run() == [(STARTED, "demo/web", "veth7", flows, reason)]
    assert (grace.filled, grace.ends) == ([(7, flows)], [(7, 5)])


async def test_one_that_cannot_be_ended_is_a_failure_of_its_gate_alone(grace: Grace) -> None:
    network = grace.node.networks["/run/netns/web"]
    interfaces = (*network.interfaces, HostInterface(8, "veth8"))
    grace.node.networks["/run/netns/web"] = dataclasses.replace(network, interfaces=interfaces)
    grace.endless.add(7)
    assert await grace.run() == [(READY, "demo/web", "veth8", 0, "")]
    assert grace.ends == [(8, 0)]
    assert grace.failed == [Event.GRACE_PERIOD_NOT_ENDED]


async def test_reply_table_of_a_gate_is_filled_once(grace: Grace) -> None:
    assert len(await grace.run()) == 1
    for _ in range(2):
        grace.node.store.mark("web")
        assert await grace.run() == []
    assert (grace.filled, grace.ends, grace.reads) == ([(7, 0)], [(7, 0)], 1)


def attach(node: Node, name: str, ifindex: int) -> PodState:
    """The reconciler's pass over a new pod: its gate has no reply table yet."""
    pod = node.add(name, ifindex)
    assert pod.netns_path is not None
    state = node.store.pods[name]
    state.netns = Netns(pod.netns_path, 4, node.inodes[pod.netns_path])
    state.network = node.networks[pod.netns_path]
    state.gates = {one.ifindex: one for one in state.network.interfaces}
    node.gates.gates[ifindex] = None
    node.grace_periods.enqueue(state)
    return state


async def test_gates_wait_while_the_last_reply_tables_show_that_one_more_would_be_late(
    grace: Grace,
) -> None:
    """15 s at most: of 0.1 s each at first, and then of the 0.2 s that each took."""
    node, room = grace.node, grace.node.grace_periods.wait_for_room
    node.worker.seconds["_fill"] = 0.2
    for number in range(100, 250):
        attach(node, f"pod{number}", number)
    async with asyncio.timeout(1):
        await room()
    attach(node, "late", 250)
    waiting = asyncio.create_task(room())
    await asyncio.sleep(100)
    assert not waiting.done()
    async with grace.filling():
        await waiting
        # The third batch of 32 is under way, so 55 wait.
        assert grace.ended() == [*range(100, 164)]
        await asyncio.sleep(100)
    assert grace.ended() == [*range(100, 251)]


async def test_pods_whose_run_was_cancelled_get_their_reply_tables_by_the_next_one(
    grace: Grace,
) -> None:
    node = grace.node
    for number in (8, 9):
        attach(node, f"pod{number}", number)
    node.worker.seconds["installed"] = 1.0
    busy = asyncio.create_task(node.worker.run(node.gates.installed))
    async with grace.filling():
        await asyncio.sleep(0.5)
    await busy
    assert (grace.filled, node.gates.calls) == ([], [])
    async with grace.filling():
        await asyncio.sleep(1)
    assert sorted(grace.filled) == [(8, 0), (9, 0)]
    assert grace.in_force.take() == ["pod8", "pod9"]


VANISHED = AttachError("attaching to interface 8")
VANISHED.__cause__ = OSError(errno.ENODEV, "No such device")


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (BUSY, ("error", Event.REPLY_TABLE_FAILED, "demo/pod8")),
        (VANISHED, ("info", Event.POD_VANISHED, "demo/pod8")),
        (OSError("no memory"), ("error", Event.REPLY_TABLE_FAILED, "all pods")),
    ],
)
async def test_reply_table_that_cannot_be_started_is_tried_again_by_the_next_pass(
    grace: Grace, error: Exception, logged: tuple[str, str, str]
) -> None:
    node = grace.node
    node.gates.failing["start replies"] = error
    state = attach(node, "pod8", 8)
    with structlog.testing.capture_logs() as lines:
        async with grace.filling():
            await asyncio.sleep(1)
            assert (grace.ends, grace.in_force.take()) == ([], [])
            node.gates.failing.clear()
            await asyncio.sleep(1)
            assert grace.ends == []
            node.grace_periods.enqueue(state)
            await asyncio.sleep(1)
    found = [(line["log_level"], line["event"], line["pod"]) for line in lines]
    assert found == [logged, ("info", READY, "demo/pod8")]
    assert (grace.ends, grace.in_force.take()) == ([(8, 0)], ["pod8"])


@pytest.mark.parametrize("failure", ["error", "cancellation"])
async def test_reply_table_that_was_started_and_not_filled_is_filled_by_the_next_pass(
    grace: Grace, failure: str
) -> None:
    node = grace.node
    state = attach(node, "pod8", 8)
    if failure == "error":
        grace.fill_error = OSError("no memory")
    else:
        node.worker.seconds["_fill"] = 5.0
    async with grace.filling():
        await asyncio.sleep(1)
    assert (node.gates.with_replies, grace.ends) == ({8}, [])
    grace.fill_error = None
    node.worker.seconds.clear()
    grace.filled.clear()
    async with grace.filling():
        for _ in range(2):
            node.grace_periods.enqueue(state)
            await asyncio.sleep(10)
    assert (grace.filled, grace.ends) == ([(8, 0)], [(8, 0)])


@pytest.mark.parametrize("lost", ["netns", "network"])
async def test_pod_without_a_network_gets_no_reply_table(grace: Grace, lost: str) -> None:
    setattr(attach(grace.node, "pod8", 8), lost, None)
    async with grace.filling():
        await asyncio.sleep(1)
    assert (grace.reads, grace.filled, grace.ends) == (0, [], [])
