"""Groups of probes with one rhythm, which lookups decide together.

As long as all listeners of a group have room, its lookups cost one system call and no work for each
probe: a group only counts. A slot is brought up to date when something else needs its state
(`SlotLookup.catch_up`), and when it leaves its group.
"""

import collections
import math

import msgspec

from probes.engine.slots import Slot

_GRIDS_SECONDS = ((2.5, 0.25), (1.0, 0.1), (0.0, 0.01))
"""Probes of at least the first period start up to the second number earlier, so that many share a
system call and a wake-up: at most a tenth of their period."""

_KEPT = 30
"""Durations that are kept before they are passed on together."""


class SlotLookup:
    """The lookups of one slot. Also its timer, while the next probe is a lookup."""

    __slots__ = (
        "connects_at",
        "differs",
        "disagreements",
        "expires",
        "group",
        "joined",
        "left",
        "queries",
        "seconds",
        "slot",
    )

    def __init__(self, slot: Slot, queries: tuple[bytes, ...]) -> None:
        self.slot = slot
        self.queries = queries
        """One for each group of addresses, all of which must have room."""
        self.left = 0
        """Lookups before the next connection."""
        self.group: LookupGroup | None = None
        """None while the next probe is no lookup."""
        self.joined = (0, 0)
        """The group's counts up to which the slot is up to date: lookups and ticks."""
        self.expires = 0
        """The group's count of lookups at which the slot leaves it."""
        self.connects_at = 0
        """As `expires`, when the next probe is no lookup."""
        self.disagreements = 0
        self.differs = False
        """Connections have failed although lookups found room."""
        self.seconds: list[float] = []
        """Durations of the newest lookups, which are not passed on yet."""

    def cancel(self) -> None:
        if self.group is not None:
            self.group.remove(self.slot)

    def catch_up(self) -> None:
        """Bring the slot's state up to date with its group."""
        if self.group is not None:
            self.group.update(self)

    def connect_next(self) -> None:
        """The next probe connects."""
        group = self.group
        if group is not None:
            group.remove(self.slot)
        self.left = 0
        if group is not None:
            group.add(self)


class LookupGroup:
    """Slots of one period that are due in one tick of its grid."""

    def __init__(self, period: float, grid: float, number: int) -> None:
        """number: of the tick; a period has a whole number of them."""
        self.period = period
        self.number = number
        self.answered: dict[Slot, SlotLookup] = {}
        """Those of which each lookup is reported."""
        self._grid = grid
        self._ticks_per_period = round(period / grid)
        self._slots: dict[Slot, SlotLookup] = {}
        self._expired: dict[int, list[SlotLookup]] = collections.defaultdict(list)
        """By the group's count of lookups; those that left earlier, too."""
        self._queries: list[bytes] | None = None
        self._lookups = 0
        self._seconds = collections.deque[float](maxlen=_KEPT)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots)

    @property
    def key(self) -> tuple[float, int]:
        return self.period, self.number

    @property
    def at(self) -> float:
        return self.number * self._grid

    @property
    def queries(self) -> list[bytes]:
        """Of all slots, in their order."""
        if self._queries is None:
            self._queries = [query for each in self._slots.values() for query in each.queries]
        return self._queries

    def add(self, lookup: SlotLookup) -> None:
        """A slot that is due in this tick."""
        slot = lookup.slot
        lookup.group = self
        lookup.joined = self._lookups, self.number
        lookup.connects_at = self._lookups + lookup.left
        lookup.expires = self._lookups + min(lookup.left, _KEPT)
        self._expired[lookup.expires].append(lookup)
        self._slots[slot] = lookup
        self._queries = None
        if slot.worker.probe.answered:
            self.answered[slot] = lookup

    def remove(self, slot: Slot) -> SlotLookup:
        """Bring it up to date and forget it; its next probe is due in this tick."""
        lookup = self._slots.pop(slot)
        self.update(lookup)
        lookup.group = None
        self._queries = None
        self.answered.pop(slot, None)
        return lookup

    def absorb(self, other: "LookupGroup") -> None:
        """Take over all slots of another group of the same tick."""
        for slot in other.slots:
            self.add(other.remove(slot))

    def pop_expired(self) -> list[SlotLookup]:
        """Remove the slots that connect in this tick, or whose durations are to be passed on."""
        return [
            self.remove(lookup.slot)
            for lookup in self._expired.pop(self._lookups, ())
            if lookup.group is self and lookup.expires == self._lookups
        ]

    def pop_soon(self, every: int, most: int) -> list[SlotLookup]:
        """Once in `every` periods remove up to `most` slots that connect before the next time.

        Groups of one period do so in different ones.
        """
        period, phase = divmod(self.number, self._ticks_per_period)
        if (period + phase) % every:
            return []
        found: list[SlotLookup] = []
        for count in range(self._lookups + 1, self._lookups + every):
            for lookup in self._expired.get(count, ()):
                if len(found) >= most:
                    return found
                if lookup.connects_at == count and lookup.group is self:
                    found.append(self.remove(lookup.slot))
        return found

    def without_room(self, answers: bytes) -> list[Slot]:
        """answers: to `queries`."""
        found, position = [], 0
        for slot, lookup in self._slots.items():
            end = position + len(lookup.queries)
            if 0 in answers[position:end]:
                found.append(slot)
            position = end
        return found

    def pass_all(self, seconds: float, now: float) -> None:
        """The probes of this tick have passed, by a lookup of this duration. On to the next tick
        that is not over."""
        self._lookups += 1
        self._seconds.append(seconds)
        self.number += self._ticks_per_period
        while (self.number + 1) * self._grid <= now:
            self.number += self._ticks_per_period

    def update(self, lookup: SlotLookup) -> None:
        """Apply what has passed since the slot was last up to date."""
        lookups, number = lookup.joined
        count = self._lookups - lookups
        if not count:
            return
        lookup.joined = self._lookups, self.number
        lookup.left -= count
        seconds = list(self._seconds)[-count:]
        lookup.seconds += seconds
        slot = lookup.slot
        slot.passed += count
        periods = (self.number - number) // self._ticks_per_period
        slot.due = slot.worker.repeat_success(count, periods * self.period)
        outcome = slot.outcome
        if outcome is not None and not outcome.is_looked_up:
            slot.outcome = msgspec.structs.replace(
                outcome, duration_seconds=seconds[-1], is_looked_up=True
            )


def grid_of(period_seconds: float) -> float:
    """The ticks' distance in seconds, of which a period is a multiple."""
    longest = next(grid for period, grid in _GRIDS_SECONDS if period_seconds >= period)
    return period_seconds / math.ceil(period_seconds / longest)
