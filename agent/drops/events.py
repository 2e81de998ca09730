"""Refusals one by one, for `podgate drops --follow`: a sample; the aggregate misses nobody."""

import asyncio
import collections
from collections.abc import Iterator

import structlog
from prometheus_client import core

from agent.admin.report import DropEvents, DropEventStatus
from agent.drops.source_processes import SourceProcesses, protocol_word, wall_clock
from agent.logs import Event
from agent.metrics import MetricFamily, single
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf.drop_events import DropEvent, DropEventReader

log = structlog.get_logger(__name__)

# What a reader who comes by every second can miss none of: two CPUs tell 320 in that time.
_KEPT = 2000
# The ring holds two seconds of what one CPU may tell at most.
_PERIOD_SECONDS = 0.5
_SAID_AGAIN_SECONDS = 60.0


SUPPRESSED = MetricFamily(
    "podgate_drop_events_suppressed_total",
    "counter",
    "Drop events suppressed by rate limiting. The drops themselves are counted.",
)


class DropEventLog:
    """The newest refusals, numbered from 1 on, with the names that pods have at that moment."""

    def __init__(
        self,
        events: DropEventReader,
        *,
        callers: SourceProcesses,
        store: PodStore,
    ) -> None:
        """callers: has the names of cgroups."""
        self._events = events
        self._store = store
        self._callers = callers
        self._kept: collections.deque[tuple[DropEvent, Pod | None]] = collections.deque(
            maxlen=_KEPT
        )
        self._count = 0
        self._lost = events.lost()
        self._lost_said_at = float("-inf")

    async def run(self) -> None:
        """Empty the ring before it is full, for ever."""
        while True:
            await self._read()
            await asyncio.sleep(_PERIOD_SECONDS)

    async def after(self, number: int) -> DropEvents:
        """Those after the one with this number (0: all that are kept), the oldest first."""
        await self._read()
        first = self._count - len(self._kept) + 1
        return DropEvents(
            events=[
                self._status(refusal, pod)
                for at, (refusal, pod) in enumerate(self._kept, start=first)
                if at > number
            ],
            newest=self._count,
            lost=self._lost,
        )

    def collect(self) -> Iterator[core.Metric]:
        yield single(SUPPRESSED, self._lost)

    async def _read(self) -> None:
        fresh = self._events.read()
        for refusal in fresh:
            self._kept.append((refusal, self._store.pod_of_interface(refusal.ifindex)))
            self._count += 1
        # Now, since a cgroup may be gone in a moment.
        await asyncio.to_thread(self._callers.learn, {refusal.cgroup for refusal in fresh})
        lost = self._events.lost()
        now = asyncio.get_running_loop().time()
        if lost > self._lost and now - self._lost_said_at >= _SAID_AGAIN_SECONDS:
            self._lost_said_at = now
            log.warning(
                Event.DROP_EVENTS_SUPPRESSED,
                count=lost - self._lost,
            )
        self._lost = lost

    def _status(self, refusal: DropEvent, pod: Pod | None) -> DropEventStatus:
        return DropEventStatus(
            at=wall_clock(refusal.at_ns),
            namespace=pod.namespace if pod else "",
            pod=pod.name if pod else "",
            verdict=refusal.verdict.label,
            reason=refusal.reason.label,
            protocol=protocol_word(refusal.protocol) if refusal.protocol else "",
            source_address=str(refusal.source or ""),
            source_port=refusal.source_port,
            destination_address=str(refusal.destination or ""),
            destination_port=refusal.destination_port,
            cgroup=self._callers.sender(refusal.cgroup),
            process=refusal.pid,
            process_name=refusal.process_name,
        )
