"""Packets that have no record yet, from readings of the kernel's table and of gate counters."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from bpf.counters import Counts
from bpf.drop_sources import DropSource
from bpf.verdicts import Mode, Reason, Verdict

Key = tuple[int, int, int, int, Mode]
"""Cgroup, interface, protocol, port and mode."""

# A packet is in a counter a moment before or after it is in the table, on each CPU.
_READINGS = 3
_RECORDED = frozenset(
    (verdict, reason)
    for verdict in (Verdict.DROP, Verdict.WOULD_DROP)
    for reason in (Reason.NODE, Reason.KERNEL, Reason.STRICT, Reason.HAIRPIN)
)
"""What counts in the table, too (src/new_flow.h, src/hooks.c)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fresh:
    """Packets of a source that no record counts. first_ns, last_ns: CLOCK_MONOTONIC."""

    source: DropSource
    packets: int
    first_ns: int


class Tally:
    """Compares readings. Entries of the table may be forgotten at any time, and what they had not
    shown by then is the difference to the gate's counters.

    The first reading of both is where it begins, `begin`. What a gate drops within that reading may
    remain uncounted if it is lost later.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, DropSource] = {}
        self._fresh: dict[Key, Fresh] = {}
        self._seen = collections.Counter[int]()
        """By interface, packets that the table has shown."""
        self._before: dict[int, int] = {}
        """By interface, of its counters what no record is to count."""
        self._counted: dict[int, int] = {}
        """By interface, the last reading of its counters."""
        self._readings: dict[int, collections.deque[int]] = {}
        self._lost: dict[int, int] = {}
        self._unreported_lost = 0
        self.has_begun = False

    def begin(self, counts: Mapping[int, Counts]) -> None:
        """The table has been read, and then these counters. Once: until then nothing is fresh."""
        self._before = {ifindex: recorded(of_gate) for ifindex, of_gate in counts.items()}
        self._counted = dict(self._before)
        self.has_begun = True

    def observe(self, sources: Iterable[DropSource]) -> None:
        """A reading of the whole table."""
        entries: dict[Key, DropSource] = {}
        for one in sources:
            key = one.cgroup, one.ifindex, one.protocol, one.port, one.mode
            before = self._entries.get(key)
            is_same = before is not None and before.first_ns == one.first_ns
            shown = before.count if before and is_same else 0
            # A reading beside a CPU that adds its packets may miss them once.
            entries[key] = before if before and is_same and shown > one.count else one
            if one.count > shown:
                self._add(key, one, one.count - shown, before.last_ns if before and is_same else 0)
        self._entries = entries

    def account(self, counts: Mapping[int, Counts]) -> None:
        """counts: by interface, of a reading before that of the table which `observe` had."""
        for ifindex, of_gate in counts.items():
            counted = recorded(of_gate)
            before = self._before.setdefault(ifindex, 0)
            if counted < self._counted.get(ifindex, 0):
                # Another gate of the same interface.
                self._forget(ifindex)
                before = self._before[ifindex] = counted
            self._counted[ifindex] = counted
            readings = self._readings.setdefault(ifindex, collections.deque(maxlen=_READINGS))
            readings.append(counted - before - self._seen[ifindex])
            if len(readings) == _READINGS and min(readings) > self._lost.get(ifindex, 0):
                self._unreported_lost += min(readings) - self._lost.get(ifindex, 0)
                self._lost[ifindex] = min(readings)
        for ifindex in self._before.keys() - counts.keys():
            self._forget(ifindex)
            del self._before[ifindex]

    def take(self) -> tuple[list[Fresh], int]:
        """What no record counts yet, the busiest first, and packets that were lost since."""
        fresh, lost = self._fresh, self._unreported_lost
        self._fresh, self._unreported_lost = {}, 0
        return sorted(fresh.values(), key=lambda one: -one.packets), lost

    def _add(self, key: Key, source: DropSource, packets: int, last_ns: int) -> None:
        """last_ns: of the packet before these, 0 for a new entry."""
        if not self.has_begun:
            return
        self._seen[source.ifindex] += packets
        if added := self._fresh.get(key):
            self._fresh[key] = Fresh(source, added.packets + packets, added.first_ns)
        else:
            self._fresh[key] = Fresh(source, packets, last_ns or source.first_ns)

    def _forget(self, ifindex: int) -> None:
        del self._seen[ifindex]
        self._readings.pop(ifindex, None)
        self._counted.pop(ifindex, None)
        self._lost.pop(ifindex, None)


def recorded(counts: Counts) -> int:
    """Of a gate, the packets that are in the table, too."""
    return sum(count for key, count in counts.items() if key in _RECORDED)
