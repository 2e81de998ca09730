"""Drop events are read as they come, and what the kernel suppresses after the last one, too."""

import asyncio
import ipaddress
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import structlog.testing

from agent.admin.report import DropEvents, DropEventStatus
from agent.drops.events import DropEventLog
from bpf.drop_events import DropEvent
from bpf.verdicts import Reason, Verdict
from tests.agent.drops.test_history import WEB, Node

pytestmark = pytest.mark.looptime


class Ring:
    """The kernel's drop events: readable while there are some."""

    def __init__(self) -> None:
        self.events: list[DropEvent] = []
        self.suppressed = 0
        self.reads = 0
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def add(self, event: DropEvent) -> None:
        self.events.append(event)
        os.eventfd_write(self._descriptor, 1)

    def read(self) -> list[DropEvent]:
        self.reads += 1
        events, self.events = self.events, []
        if events:
            os.eventfd_read(self._descriptor)
        return events

    def lost(self) -> int:
        return self.suppressed

    def close(self) -> None:
        os.close(self._descriptor)


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    made.close()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Node:
    return Node(monkeypatch, tmp_path)


def made(ring: Ring, node: Node) -> DropEventLog:
    events: Any = ring
    return DropEventLog(events, sources=node.processes, store=node.store)


async def test_events_that_are_suppressed_after_the_last_one_are_counted(
    ring: Ring, node: Node
) -> None:
    """The kernel's budget is used up, so no event makes the ring readable again."""
    log = made(ring, node)
    seen: list[tuple[int, int]] = []
    read = asyncio.Event()

    def observe(fresh: Any, suppressed: int) -> None:
        seen.append((len(fresh), suppressed))
        read.set()

    log.observer = observe
    task = asyncio.create_task(log.run())
    try:
        ring.add(_event())
        await read.wait()
        ring.suppressed = 7
        await asyncio.sleep(5)
        assert seen == [(1, 0), (0, 7)]
        reads = ring.reads
        await asyncio.sleep(60)
        assert ring.reads == reads, "nothing has come"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_events_are_numbered_and_have_the_names_of_their_pods(ring: Ring, node: Node) -> None:
    node.gate()
    log = made(ring, node)
    ring.add(
        _event(
            source=ipaddress.ip_address("198.18.0.1"),
            source_port=4000,
            destination=ipaddress.ip_address("198.18.0.2"),
            destination_port=80,
            protocol=6,
            cgroup=5,
            pid=17,
            process_name="curl",
        )
    )
    ring.add(_event(ifindex=8))
    ring.suppressed = 3
    found = await log.after(0)
    first, second = found.events
    assert first == DropEventStatus(
        at=first.at,
        namespace="shop",
        pod="web-1",
        verdict="drop",
        reason="node",
        protocol="tcp",
        source_address="198.18.0.1",
        source_port=4000,
        destination_address="198.18.0.2",
        destination_port=80,
        cgroup="/system.slice/backup.service",
        source_pod="",
        process=17,
        process_name="curl",
    )
    assert second == DropEventStatus(
        at=second.at,
        namespace="",
        pod="",
        verdict="drop",
        reason="node",
        protocol="udp",
        source_address="",
        source_port=0,
        destination_address="",
        destination_port=7,
        cgroup="(no socket: the kernel)",
        source_pod="",
        process=0,
        process_name="",
    )
    assert (found.newest, found.lost) == (2, 3)
    assert [one.pod for one in (await log.after(1)).events] == [""]
    assert await log.after(2) == DropEvents(events=[], newest=2, lost=3)
    (suppressed,) = log.collect()
    assert [sample.value for sample in suppressed.samples] == [3]


async def test_event_without_a_protocol_has_none(ring: Ring, node: Node) -> None:
    log = made(ring, node)
    ring.add(_event(protocol=0))
    assert [one.protocol for one in (await log.after(0)).events] == [""]


async def test_oldest_events_are_forgotten(ring: Ring, node: Node) -> None:
    log = made(ring, node)
    for number in range(2003):
        ring.add(_event(pid=number))
    found = await log.after(0)
    assert [one.process for one in found.events] == list(range(3, 2003))
    assert found.newest == 2003
    assert [one.process for one in (await log.after(2001)).events] == [2001, 2002]


async def test_observer_gets_new_events_with_their_pods(ring: Ring, node: Node) -> None:
    node.gate()
    log = made(ring, node)
    seen: list[Any] = []
    log.observer = lambda fresh, suppressed: seen.append((fresh, suppressed))
    ring.suppressed = 2
    await log.after(0)
    ring.add(_event())
    await log.after(0)
    await log.after(0)
    assert seen == [([], 2), ([(_event(), WEB)], 0)]


async def test_suppressed_events_are_logged_at_most_once_a_minute(ring: Ring, node: Node) -> None:
    ring.suppressed = 5
    log = made(ring, node)
    with structlog.testing.capture_logs() as lines:
        for suppressed, seconds in ((5, 1), (7, 59), (8, 1), (9, 60), (9, 60)):
            ring.suppressed = suppressed
            await log.after(0)
            await asyncio.sleep(seconds)
    assert [line["count"] for line in lines] == [2, 1]


def _event(**changes: Any) -> DropEvent:
    fields: dict[str, Any] = {
        **{"at_ns": 1, "verdict": Verdict.DROP, "reason": Reason.NODE, "ifindex": 7},
        **{"protocol": 17, "source": None, "source_port": 0, "destination": None},
        **{"destination_port": 7, "cgroup": 0, "pid": 0, "process_name": ""},
    }
    return DropEvent(**(fields | changes))
