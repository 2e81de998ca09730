"""Drop events for `podgate drops --follow`. They are sampled; the aggregate counts every packet."""

import asyncio
import collections
from collections.abc import Callable, Iterator, Sequence

import structlog
from prometheus_client import core

from agent.admin.report import DropEvents, DropEventStatus
from agent.drops.source_processes import SourceProcesses, protocol_word, wall_clock
from agent.linux import descriptors
from agent.logs import Event
from agent.metrics import MetricFamily, single
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf.drop_events import DropEvent, DropEventReader

log = structlog.get_logger(__name__)

# A reader that polls every second misses none of these: two CPUs send 320 in that time.
_MAX_RECENT = 2000
# Between two reads. The ring holds two seconds of what one CPU may send at most.
_PERIOD_SECONDS = 0.5
_LOG_AGAIN_SECONDS = 60.0


Observer = Callable[[Sequence[tuple[DropEvent, Pod | None]], int], None]
"""Of new events, and of the number that the kernel suppressed meanwhile."""

SUPPRESSED = MetricFamily(
    "podgate_drop_events_suppressed_total",
    "counter",
    "Drop events suppressed by rate limiting. The drops themselves are counted.",
)


class DropEventLog:
    """The newest events, numbered from 1 on, with the names that pods have at that moment."""

    def __init__(
        self,
        events: DropEventReader,
        *,
        sources: SourceProcesses,
        store: PodStore,
    ) -> None:
        """sources: has the names of cgroups."""
        self._events = events
        self._store = store
        self._sources = sources
        self._recent: collections.deque[tuple[DropEvent, Pod | None]] = collections.deque(
            maxlen=_MAX_RECENT
        )
        self._count = 0
        self._lost = events.lost()
        self._lost_logged_at = float("-inf")
        self.observer: Observer | None = None
        """Gets each event, once its cgroup has a name."""

    async def run(self) -> None:
        """Empty the ring before it is full, until cancelled. Without events nothing is read: the
        kernel suppresses one only after it has sent others, or while the ring is full. A read
        that found some is followed by another, since none that is suppressed wakes it."""
        while True:
            found = await self._read()
            await asyncio.sleep(_PERIOD_SECONDS)
            if not found:
                await descriptors.readable(self._events)

    async def after(self, number: int) -> DropEvents:
        """Those after the one with this number (0: all that are kept), the oldest first."""
        await self._read()
        first = self._count - len(self._recent) + 1
        return DropEvents(
            events=[
                self._status(event, pod)
                for at, (event, pod) in enumerate(self._recent, start=first)
                if at > number
            ],
            newest=self._count,
            lost=self._lost,
        )

    def collect(self) -> Iterator[core.Metric]:
        yield single(SUPPRESSED, self._lost)

    async def _read(self) -> bool:
        """Whether there were new events, or suppressed ones."""
        fresh = [
            (event, self._store.pod_of_interface(event.ifindex)) for event in self._events.read()
        ]
        self._recent += fresh
        self._count += len(fresh)
        if fresh:
            self._sources.hint()
            # Now, since a cgroup may be gone in a moment.
            await asyncio.to_thread(self._sources.learn, {event.cgroup for event, _ in fresh})
        lost = self._events.lost()
        now = asyncio.get_running_loop().time()
        if lost > self._lost and now - self._lost_logged_at >= _LOG_AGAIN_SECONDS:
            self._lost_logged_at = now
            log.warning(
                Event.DROP_EVENTS_SUPPRESSED,
                count=lost - self._lost,
            )
        suppressed, self._lost = lost - self._lost, lost
        found = bool(fresh or suppressed)
        if self.observer and found:
            self.observer(fresh, suppressed)
        return found

    def _status(self, event: DropEvent, pod: Pod | None) -> DropEventStatus:
        return DropEventStatus(
            at=wall_clock(event.at_ns),
            namespace=pod.namespace if pod else "",
            pod=pod.name if pod else "",
            verdict=event.verdict.label,
            reason=event.reason.label,
            protocol=protocol_word(event.protocol) if event.protocol else "",
            source_address=str(event.source or ""),
            source_port=event.source_port,
            destination_address=str(event.destination or ""),
            destination_port=event.destination_port,
            cgroup=self._sources.cgroup_path(event.cgroup),
            source_pod=self._sources.source(event.cgroup).pod_name,
            process=event.pid,
            process_name=event.process_name,
        )
