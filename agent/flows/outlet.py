"""The way of records to an output: a bounded queue and a thread, which count what is lost."""

import collections
import datetime
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import structlog
from prometheus_client import core

from agent.backoff import Backoff
from agent.flows.records import LostRecord, Place, Record, packets_of
from agent.logs import Event
from agent.metrics import MetricFamily, labelled, single

log = structlog.get_logger(__name__)

# Some 20 MB: what 500 sources in each of 40 intervals are.
_MAX_QUEUED = 20_000
_BATCH = 500
# With back-off about two minutes, in which a collector restarts or a disk is cleaned.
_ATTEMPTS = 8
_BASE_SECONDS, _CAP_SECONDS = 1.0, 30.0
# Until then it may pass by itself.
_OUTAGE_SECONDS = 60.0

RECORDS = MetricFamily(
    "podgate_flow_records_total", "counter", "Records of flows that the output has accepted."
)
LOST_RECORDS = MetricFamily(
    "podgate_flow_records_lost_total",
    "counter",
    "Records of flows that are lost, by place: samples (single drops beyond the limits), queue (it "
    "was full) or rejected (by the output).",
    ("place",),
)
LOST_PACKETS = MetricFamily(
    "podgate_flow_packets_lost_total",
    "counter",
    "Packets that no record of a flow counts, by place: kernel (its table had no room for their "
    "source), queue or rejected.",
    ("place",),
)


class RecordsRejectedError(OSError):
    """The output has rejected this number of the records, and must not get them again."""

    def __init__(self, records: int, reason: str) -> None:
        super().__init__(reason)
        self.records = records


class Output(Protocol):
    """Where records go."""

    def send(self, records: Sequence[Record]) -> None:
        """All of them or none, but for those of `RecordsRejectedError`. Raises `OSError` and
        `ValueError`. Blocks."""

    def close(self) -> None: ...


class _Lost:
    """What is lost in one place."""

    def __init__(self) -> None:
        self.records = self.packets = 0
        self.reported_records = self.reported_packets = 0
        self.since: datetime.datetime | None = None
        """Of the first that is not reported."""


class Outlet:
    """Never blocks but in its own thread, and loses nothing without a record of it.

    A batch that the output rejects is tried again with back-off, for a bounded number of times.
    The next batch that it accepts starts with what is lost.
    """

    def __init__(
        self,
        output: Output,
        *,
        name: str,
        node: str,
        max_queued: int = _MAX_QUEUED,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """name: of the output, for people; node: of the records; backoff: between attempts; clock:
        seconds."""
        self._output = output
        self._name = name
        self._node = node
        self._max_queued = max_queued
        self._clock = clock
        self._backoff = backoff or Backoff(base_seconds=_BASE_SECONDS, cap_seconds=_CAP_SECONDS)
        self._queue: collections.deque[Record] = collections.deque()
        self._lost: dict[Place, _Lost] = {place: _Lost() for place in typing.get_args(Place)}
        self._sent = 0
        self._error = ""
        self._trying_since: float | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"flows to {name}", daemon=True)

    def start(self) -> None:
        """Unless it runs. Raises `RuntimeError` without a free thread, and if it has ended."""
        if not self._thread.is_alive():
            self._thread.start()

    def put(self, records: Sequence[Record]) -> None:
        """Queue them; those without room are lost."""
        with self._changed:
            room = self._max_queued - len(self._queue)
            self._queue += records[:room]
            if rest := records[room:]:
                self._lose("queue", len(rest), packets_of(rest))
            self._changed.notify()

    def lose_packets(self, packets: int) -> None:
        """The kernel has lost them."""
        with self._changed:
            self._lose("kernel", 0, packets)
            self._changed.notify()

    def lose_samples(self, drops: int) -> None:
        """Single drops beyond the limits, which other records count."""
        with self._changed:
            self._lose("samples", drops, 0)
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Send what is queued for up to this time, and end. Blocks."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def problem(self) -> str:
        """Why the output has accepted nothing for a minute, one sentence, or empty."""
        since = self._trying_since
        if since is None or self._clock() - since < _OUTAGE_SECONDS:
            return ""
        why = self._error or "it does not respond"
        return f"Records of flows cannot be written to {self._name}: {why}"

    def collect(self) -> Iterator[core.Metric]:
        """As a collector of prometheus_client."""
        lost = self._lost.items()
        yield single(RECORDS, self._sent)
        yield labelled(
            LOST_RECORDS, (((place,), of.records) for place, of in lost if place != "kernel")
        )
        yield labelled(
            LOST_PACKETS, (((place,), of.packets) for place, of in lost if place != "samples")
        )

    def _lose(self, place: Place, records: int, packets: int) -> None:
        lost = self._lost[place]
        lost.records += records
        lost.packets += packets
        lost.since = lost.since or _now()

    def _run(self) -> None:
        while self._wait():
            self._send_next()
        self._output.close()

    def _wait(self) -> bool:
        """Until there is something to send: whether there is."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._queue or any(self._lost_records())
            )
            return bool(self._queue) or (not self._is_closed) or any(self._lost_records())

    def _send_next(self) -> None:
        """A batch: sent, or lost after some attempts."""
        with self._changed:
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
        if self._trying_since is None:
            self._trying_since = self._clock()
        for _ in range(_ATTEMPTS):
            if self._try(batch):
                return
            with self._changed:
                # A closed one tries each batch once.
                if self._changed.wait_for(
                    lambda: self._is_closed, timeout=self._backoff.next_seconds()
                ):
                    break
        with self._changed:
            if batch:
                self._lose("rejected", len(batch), packets_of(batch))
            if self._is_closed:
                self._drop_all()

    def _try(self, batch: list[Record]) -> bool:
        with self._changed:
            lost = list(self._lost_records())
        rejected = 0
        try:
            self._output.send([*lost, *batch])
        except RecordsRejectedError as error:
            self._fail(error)
            # It does not name them: all packets may be lost.
            rejected = min(error.records, len(batch))
            if rejected:
                with self._changed:
                    self._lose("rejected", rejected, packets_of(batch))
            if error.records >= len(lost) + len(batch):
                batch.clear()
                return False
        except (OSError, ValueError) as error:  # a name may not be UTF-8
            self._fail(error)
            return False
        else:
            if self._error:
                log.info(Event.FLOWS_WRITTEN, output=self._name)
            self._error = ""
        with self._changed:
            self._sent += len(batch) - rejected
            for one in lost:
                of_place = self._lost[one.place]
                of_place.reported_records += one.records
                of_place.reported_packets += one.packets
                is_more = (of_place.records, of_place.packets) != (
                    of_place.reported_records,
                    of_place.reported_packets,
                )
                of_place.since = _now() if is_more else None
        self._trying_since = None
        self._backoff.reset()
        return True

    def _fail(self, error: Exception) -> None:
        is_new = not self._error
        self._error = str(error)
        if is_new:
            log.warning(Event.FLOWS_NOT_WRITTEN, output=self._name, error=self._error)

    def _lost_records(self) -> Iterator[LostRecord]:
        """Of what is not reported."""
        for place, lost in self._lost.items():
            if lost.since is not None:
                yield LostRecord(
                    time=_now(),
                    node=self._node,
                    place=place,
                    records=lost.records - lost.reported_records,
                    packets=lost.packets - lost.reported_packets,
                    since=lost.since,
                )

    def _drop_all(self) -> None:
        """The end, with an output that rejects: the metrics have it until then."""
        if self._queue:
            self._lose("rejected", len(self._queue), packets_of(self._queue))
            self._queue.clear()
        for lost in self._lost.values():
            lost.since = None


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
