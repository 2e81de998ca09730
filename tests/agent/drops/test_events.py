"""Drop events are read as they come, and what the kernel suppresses after the last one, too."""

import asyncio
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from agent.drops.events import DropEventLog
from bpf.drop_events import DropEvent
from bpf.verdicts import Reason, Verdict
from tests.agent.drops.test_history import Node

pytestmark = pytest.mark.looptime


class Ring:
    """The kernel's drop events: readable while there are some."""

    def __init__(self) -> None:
        self.events: list[DropEvent] = []
        self.suppressed = 0
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def add(self, event: DropEvent) -> None:
        self.events.append(event)
        os.eventfd_write(self._descriptor, 1)

    def read(self) -> list[DropEvent]:
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


async def test_events_that_are_suppressed_after_the_last_one_are_counted(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The kernel's budget is used up, so no event makes the ring readable again."""
    node = Node(monkeypatch, tmp_path)
    events: Any = ring
    log = DropEventLog(events, sources=node.processes, store=node.store)
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
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _event() -> DropEvent:
    return DropEvent(
        at_ns=1,
        verdict=Verdict.DROP,
        reason=Reason.NODE,
        ifindex=7,
        protocol=17,
        source=None,
        source_port=0,
        destination=None,
        destination_port=7,
        cgroup=0,
        pid=0,
        process_name="",
    )
