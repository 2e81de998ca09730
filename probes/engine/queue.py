"""Due probes: started in order, up to a maximum, and a few in each turn of the loop; urgent ones
before all others.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from probes.engine.slots import Slot

MAX_IN_FLIGHT = 200
"""Enough for a node full of pods that all time out, at some 50 KB of sockets each."""

URGENT_EXTRA = 50
"""Places beyond the maximum for urgent probes: pods that all time out do not delay these."""

BURST_MAX = 32
"""Probes started in one turn of the loop: most take 50 us at once, and other work waits."""


class DueQueue:
    """Delays probes over the maximum, and drops none."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start: Callable[[Slot], None],
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        """start: starts a slot's probe, which takes one place until `release`."""
        self.in_flight = 0
        self._loop = loop
        self._start = start
        self._max_in_flight = max_in_flight
        self._waiting: deque[Slot] = deque()
        self._urgent: deque[Slot] = deque()
        self._started_in_turn = 0
        self._next_turn_is_set = False

    def __len__(self) -> int:
        """Number of waiting probes; removed ones may still be in the deques."""
        return len({slot for slot in (*self._urgent, *self._waiting) if slot.waiting})

    def add(self, slot: Slot) -> None:
        """Add a due slot; it waits while its `waiting` is set."""
        slot.waiting = True
        (self._urgent if slot.is_urgent else self._waiting).append(slot)
        self._start_some()

    def hurry(self, slot: Slot) -> None:
        """Put a slot that waits before all that are not urgent; nothing is started yet."""
        self._urgent.append(slot)
        self._set_next_turn()

    def release(self) -> None:
        """Free the place of a probe that finished or was stopped."""
        self.in_flight -= 1
        if self._urgent or self._waiting:
            self._set_next_turn()

    def _start_some(self) -> None:
        while self._started_in_turn < BURST_MAX:
            slot = self._next()
            if slot is None:
                break
            if slot.waiting:
                slot.waiting = slot.is_urgent = False
                self._started_in_turn += 1
                self.in_flight += 1
                self._start(slot)
        if self._started_in_turn:
            self._set_next_turn()

    def _next(self) -> Slot | None:
        """The first of the queue, if there is a place for it."""
        if self._urgent and self.in_flight < self._max_in_flight + URGENT_EXTRA:
            return self._urgent.popleft()
        if self._waiting and self.in_flight < self._max_in_flight:
            return self._waiting.popleft()
        return None

    def _set_next_turn(self) -> None:
        if not self._next_turn_is_set:
            self._next_turn_is_set = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._next_turn_is_set = False
        self._started_in_turn = 0
        self._start_some()
