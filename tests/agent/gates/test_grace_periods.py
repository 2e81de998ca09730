"""When grace periods end, with the real store and reconciler on a node in memory, in fake time."""

import asyncio
import dataclasses
import ipaddress
import socket
import time
from collections.abc import Callable

import pytest
import structlog.testing

from agent.gates import pending_flows
from agent.gates.pending_flows import PendingFlows
from agent.linux.pod_network import HostInterface
from agent.logs import Event
from bpf.replies import ReplyFlow
from probes.netns import NetnsGoneError
from tests.agent.app.node import Node

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
        self.filled.append((ifindex, len(flows)))
        return self.has_room

    def _end(self, ifindex: int, at_ns: int) -> None:
        if ifindex in self.endless:
            raise OSError("no map")
        self.in_force.take()
        seconds = (at_ns - time.monotonic_ns()) / 1e9
        self.ends.append((ifindex, round(seconds) if at_ns else 0))

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


def gone() -> PendingFlows:
    raise NetnsGoneError("/run/netns/web does not exist.")


@pytest.mark.parametrize(
    ("pending", "has_room", "reason"),
    [
        (lambda: PendingFlows((FLOW,), "1 sockets of RAW"), True, "1 sockets of RAW"),
        (lambda: PendingFlows((FLOW,), "1 sockets of RAW"), False, "1 sockets of RAW"),
        (lambda: PendingFlows((FLOW,), ""), False, "the reply table is full"),
        (unread, True, "no netlink"),
        (gone, True, "/run/netns/web does not exist."),
    ],
    ids=["unknown", "unknown and full", "full", "unread", "gone"],
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
