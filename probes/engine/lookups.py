"""Tcp probes that a lookup of the kernel's listeners decides, without a connection.

A connection from inside the pod to its own address succeeds while a listener there has room in its
queue, unless something is between the two: rules, a filter, a proxy, a lost address. A lookup does
not see these. So a probe connects first, and lookups repeat its success; it connects again in every
`connect_every`th period at the latest, after a change of the pod (`LookupQueue.doubt`), and at once
where a lookup does not find room. Only connections fail.

Where connections fail twice in a row although lookups find room, the probe connects from then on.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from probes.engine.lookup_groups import LookupGroup, SlotLookup, grid_of
from probes.engine.slots import Slot
from probes.engine.workers import ProbeType
from probes.netns import Netns
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.definitions import TcpSocket

# Its multiples fill an interval evenly, however many there are.
_GOLDEN = 0.6180339887498949

# A connection right after others takes a third of the CPU time of one alone, whose code and data
# the processor's caches no longer have. So those that are due in the next periods come early.
_GATHERED_MAX = 10  # periods
_TOGETHER_MAX = 32  # they take some 2 ms

_DISAGREEMENTS_MAX = 2
"""One may be a listener that opened, or whose queue had room again, between the two."""


class ListenerTable(Protocol):
    """The kernel's listeners."""

    def query(self, netns: Netns, netns_id: int, address: str, port: int) -> bytes | None:
        """Prepare to look up one; None if the namespace no longer exists."""

    def look_up(self, queries: Sequence[bytes]) -> bytes:
        """One byte for each: 1 where a connection would be accepted, 0 where it would not be, or
        where that is not certain. Does not wait."""


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
        self._gather_every = max(1, min(connect_every // 3, _GATHERED_MAX))
        self._groups: dict[tuple[float, int], LookupGroup] = {}
        """By period and tick."""
        self._times: list[tuple[float, float, int]] = []
        """A heap: when a group's tick is, with the group's key."""
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
        period = slot.worker.probe.period_seconds
        grid = grid_of(period)
        key = period, int(due // grid)
        group = self._groups.get(key)
        if group is None:
            group = LookupGroup(period, grid, key[1])
            self._schedule(group)
            if self._times[0][1:] == key:
                self._set_timer()
        group.add(lookup)
        return lookup

    def _schedule(self, group: LookupGroup) -> None:
        found = self._groups.get(group.key)
        if found is not None:
            found.absorb(group)
            return
        self._groups[group.key] = group
        heapq.heappush(self._times, (group.at, *group.key))

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
            lookup = slot.lookup = SlotLookup(slot, queries)
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
            slot.lookup.connect_next()

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
        if lookup is not None:
            lookup.catch_up()
            if lookup.seconds:
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
        self._timer = self._loop.call_at(self._times[0][0], self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = self._loop.time()
        due: list[LookupGroup] = []
        connecting: list[SlotLookup] = []
        while self._times and self._times[0][0] <= now:
            _, period, number = heapq.heappop(self._times)
            group = self._groups.pop((period, number), None)
            if group is None:
                continue  # all of it was taken by an earlier entry
            for lookup in group.pop_expired():
                if lookup.left > 0:
                    group.add(lookup)
                    self.settle(lookup.slot)
                else:
                    connecting.append(lookup)
            room = _TOGETHER_MAX - len(connecting)
            connecting += group.pop_soon(self._gather_every, room)
            if group:
                due.append(group)
        if due:
            connecting += self._decide(due, now)
        if self._times:
            self._set_timer()
        for group in due:
            for slot in list(group.answered):
                if slot in group.answered:
                    group.answered[slot].catch_up()
                    self._on_passed(slot)
        for lookup in connecting:
            # Unless a callback has removed or triggered it.
            if lookup.slot.timer is lookup and lookup.group is None:
                self._connect_early(lookup.slot, now)

    def _decide(self, due: list[LookupGroup], started: float) -> list[SlotLookup]:
        """Those that must connect, since not all of their listeners have room."""
        answers = self._table.look_up([query for group in due for query in group.queries])
        seconds = self._loop.time() - started
        have_all_room = 0 not in answers
        position = 0
        connecting = []
        for group in due:
            end = position + len(group.queries)
            if not have_all_room:
                for slot in group.without_room(answers[position:end]):
                    lookup = group.remove(slot)
                    lookup.left = 0
                    connecting.append(lookup)
            position = end
            if group:
                group.pass_all(seconds, started)
                self._schedule(group)
        return connecting

    def _connect_early(self, slot: Slot, now: float) -> None:
        slot.timer = None
        slot.worker.skip_tick(now)
        self._connect(slot)
