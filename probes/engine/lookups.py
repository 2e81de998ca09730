"""Tcp probes that a lookup of the kernel's listeners decides, without a connection.

A connection from inside the pod to its own address succeeds while a listener there has room in its
queue, unless something is between the two: rules, a filter, a proxy, a lost address. A lookup does
not see these. So a probe connects first, and lookups repeat its success; it connects again in every
`connect_every`th period, after a change of the pod (`LookupQueue.doubt`), and at once where a
lookup does not find room. Only connections fail.

Where connections fail twice in a row although lookups find room, the probe connects from then on.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from probes.engine.slots import Slot
from probes.engine.workers import ProbeType
from probes.netns import Netns
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.definitions import TcpSocket

_GRIDS_SECONDS = ((2.5, 0.25), (1.0, 0.1), (0.0, 0.01))
"""Probes of at least the first period start up to the second number earlier, so that many share a
system call and a wake-up: at most a tenth of their period."""

# Its multiples fill an interval evenly, however many there are.
_GOLDEN = 0.6180339887498949

_DISAGREEMENTS_MAX = 2
"""One may be a listener that opened, or whose queue had room again, between the two."""

_KEPT = 30
"""Durations that are kept before they are passed on together."""


class ListenerTable(Protocol):
    """The kernel's listeners."""

    def query(self, netns: Netns, netns_id: int, address: str, port: int) -> bytes | None:
        """Prepare to look up one; None if the namespace no longer exists."""

    def look_up(self, queries: Sequence[bytes]) -> bytes:
        """One byte for each: 1 where a connection would be accepted, 0 where it would not be, or
        where that is not certain. Does not wait."""


class SlotLookup:
    """The lookups of one slot. Also its timer, while the next probe is a lookup."""

    __slots__ = ("at", "differs", "disagreements", "grid", "left", "queries", "seconds")

    def __init__(self, queries: tuple[bytes, ...]) -> None:
        self.queries = queries
        """One for each group of addresses, all of which must have room."""
        self.grid = 0.0
        """Seconds; of the period."""
        self.left = 0
        """Lookups before the next connection."""
        self.at: float | None = None
        """The place in the queue that counts."""
        self.disagreements = 0
        self.differs = False
        """Connections have failed although lookups found room."""
        self.seconds: list[float] = []
        """Durations of the newest lookups, which are not passed on yet."""

    def cancel(self) -> None:
        self.at = None


class LookupQueue:
    """Due lookups of all slots, in one system call for those that are due together."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        table: ListenerTable,
        *,
        connect: Callable[[Slot], None],
        on_lookups: Callable[[Slot, list[float]], None],
        on_passed: Callable[[Slot], None],
        is_direct: Callable[[Netns, str, int], bool],
        connect_every: int,
    ) -> None:
        """
        :param connect: gets a slot that is due and must connect
        :param on_lookups: gets durations in seconds of a slot's successes, the oldest first; those
            that `settle` has not passed on are passed on together
        :param on_passed: gets a slot of an answered probe that has just passed
        :param is_direct: whether the last connection to this port was accepted by the process that
            listens there
        :param connect_every: periods; at least 2
        """
        self._loop = loop
        self._table = table
        self._connect = connect
        self._on_lookups = on_lookups
        self._on_passed = on_passed
        self._is_direct = is_direct
        self._connect_every = connect_every
        self._slots: dict[float, list[Slot]] = {}
        """By time."""
        self._times: list[float] = []
        """A heap."""
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def decides(self, slot: Slot) -> bool:
        """Whether the next probe of this slot is a lookup."""
        lookup, worker = slot.lookup, slot.worker
        return (
            lookup is not None
            and lookup.left > 0
            and not slot.is_urgent
            and worker.cached is ProbeResult.SUCCESS
            and worker.run_result is ProbeResult.SUCCESS
        )

    def add(self, slot: Slot, due: float) -> SlotLookup:
        """Look up when it is due, or a little earlier; returns what cancels that."""
        lookup = slot.lookup
        assert lookup is not None
        lookup.grid = _grid(slot.worker.probe.period_seconds)
        self._put(slot, lookup, due)
        return lookup

    def _put(self, slot: Slot, lookup: SlotLookup, due: float) -> None:
        lookup.at = at = due // lookup.grid * lookup.grid
        slots = self._slots.get(at)
        if slots is not None:
            slots.append(slot)
            return
        self._slots[at] = [slot]
        heapq.heappush(self._times, at)
        if self._times[0] == at:
            self._set_timer()

    def connected(self, slot: Slot, outcome: ProbeOutcome) -> None:
        """A connection of this slot's probe has ended: whether lookups may repeat its success."""
        lookup = slot.lookup
        if outcome.result is not ProbeResult.SUCCESS:
            if lookup is not None:
                lookup.left = 0
                self._compare(lookup, outcome)
            return
        periods = self._connect_every - 1
        if lookup is None and (queries := self._queries(slot)):
            lookup = slot.lookup = SlotLookup(queries)
            # Many that begin together are not to connect together again.
            periods -= int(self._count * _GOLDEN % 1.0 * periods)
            self._count += 1
        if lookup is None:
            return
        lookup.disagreements = 0
        is_certain = not (slot.is_doubted or lookup.differs)
        may_repeat = is_certain and self._is_repeatable(slot, outcome)
        lookup.left = periods if may_repeat else 0
        slot.is_doubted = False

    def doubt(self, slot: Slot) -> None:
        """The next probe connects: something has changed in the pod."""
        slot.is_doubted = slot.worker.in_flight
        if slot.lookup is not None:
            slot.lookup.left = 0

    def changed(self, slots: Iterable[Slot]) -> list[Slot]:
        """Those whose results are not what lookups of all of them show now, in one call."""
        found = [(slot, slot.lookup) for slot in slots if slot.lookup is not None]
        answers = self._table.look_up([query for _, each in found for query in each.queries])
        position, changed = 0, []
        for slot, lookup in found:
            end = position + len(lookup.queries)
            has_room = 0 not in answers[position:end]
            position = end
            if not lookup.differs and has_room is not (slot.worker.cached is ProbeResult.SUCCESS):
                changed.append(slot)
        return changed

    def settle(self, slot: Slot) -> None:
        """Pass on what lookups have found."""
        lookup = slot.lookup
        if lookup is not None and lookup.seconds:
            seconds, lookup.seconds = lookup.seconds, []
            self._on_lookups(slot, seconds)

    def _queries(self, slot: Slot) -> tuple[bytes, ...]:
        """Empty for probes that lookups cannot decide."""
        worker, plan = slot.worker, slot.plan
        if slot.netns_id is None or worker.type is ProbeType.STARTUP:
            return ()
        if not isinstance(worker.probe.handler, TcpSocket):
            return ()
        port = worker.probe.handler.port
        queries = [
            self._table.query(slot.netns, slot.netns_id, group[0].address, port)
            for group in plan.groups
        ]
        return tuple(query for query in queries if query) if all(queries) else ()

    def _is_repeatable(self, slot: Slot, outcome: ProbeOutcome) -> bool:
        """Whether the first address of each group has accepted, and not another process."""
        firsts = [group[0].address for group in slot.plan.groups]
        if firsts != [found for found in (outcome.address, outcome.other_address) if found]:
            return False
        assert isinstance(slot.worker.probe.handler, TcpSocket)
        port = slot.worker.probe.handler.port
        return all(self._is_direct(slot.netns, address, port) for address in firsts)

    def _compare(self, lookup: SlotLookup, outcome: ProbeOutcome) -> None:
        """After a failure: whether a lookup would have hidden it."""
        if outcome.error or lookup.differs:
            return
        if all(self._table.look_up(lookup.queries)):
            lookup.disagreements += 1
            lookup.differs = lookup.disagreements >= _DISAGREEMENTS_MAX
        else:
            lookup.disagreements = 0

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._times[0], self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = self._loop.time()
        due: list[tuple[Slot, SlotLookup]] = []
        queries: list[bytes] = []
        while self._times and self._times[0] <= now:
            at = heapq.heappop(self._times)
            for slot in self._slots.pop(at):
                lookup = slot.lookup
                # A slot may be here twice, if it was removed and added again.
                if lookup is None or lookup.at != at:
                    continue
                lookup.at = slot.timer = None
                if lookup.left:
                    due.append((slot, lookup))
                    queries += lookup.queries
                else:
                    self._connect_early(slot, now)
        if self._times:
            self._set_timer()
        if due:
            self._decide(due, queries, now)

    def _decide(
        self, due: list[tuple[Slot, SlotLookup]], queries: list[bytes], started: float
    ) -> None:
        answers = self._table.look_up(queries)
        seconds = self._loop.time() - started
        have_all_room = 0 not in answers
        position = 0
        for slot, lookup in due:
            end = position + len(lookup.queries)
            if have_all_room or 0 not in answers[position:end]:
                self._pass(slot, lookup, seconds, started)
            else:
                lookup.left = 0
                self._connect_early(slot, started)
            position = end

    def _pass(self, slot: Slot, lookup: SlotLookup, seconds: float, now: float) -> None:
        lookup.left -= 1
        lookup.seconds.append(seconds)
        slot.passed += 1
        due = slot.worker.repeat_success(now)
        outcome = slot.outcome
        if outcome is not None and not outcome.is_looked_up:
            slot.outcome = msgspec.structs.replace(
                outcome, duration_seconds=seconds, is_looked_up=True
            )
        if len(lookup.seconds) >= _KEPT:
            self.settle(slot)
        if slot.worker.probe.answered:
            self._on_passed(slot)
        # The next connection, too, starts with lookups of others: that saves a wake-up.
        slot.due, slot.timer = due, lookup
        self._put(slot, lookup, due)

    def _connect_early(self, slot: Slot, now: float) -> None:
        slot.worker.skip_tick(now)
        self._connect(slot)


def _grid(period_seconds: float) -> float:
    return next(grid for period, grid in _GRIDS_SECONDS if period_seconds >= period)
