"""Times at which runs are to be woken, with one timer of the loop for all."""

import asyncio
import math
from typing import Protocol

_BURST_MAX = 16
"""Runs woken in one turn of the loop: 200 that time out at once would hold it for 20 ms."""


class Sleeper(Protocol):
    def wake(self) -> None:
        """It is time; also called if it has been removed at that moment."""


class Alarms:
    """Wakes each run at its time.

    Almost all runs end before: a timer of the loop for each, made and cancelled, would be a
    tenth of a probe's CPU time. So the one timer may be early, since it is not moved when the run
    it was set for ends; it is set again then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._times: dict[Sleeper, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def set(self, sleeper: Sleeper, at: float) -> None:
        """Wake it at this time, on the loop's clock, and not at one set before."""
        self._times[sleeper] = at
        if at < self._timer_at:
            self._set_timer(at)

    def remove(self, sleeper: Sleeper) -> None:
        """Never wake it; it may have no time."""
        self._times.pop(sleeper, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._loop.time()
        due = [sleeper for sleeper, at in self._times.items() if at <= now]
        for sleeper in due[:_BURST_MAX]:
            del self._times[sleeper]
            # Not from here: an error of one must not be in the way of others.
            self._loop.call_soon(sleeper.wake)
        if self._times:
            # The past, if more are due: they come next, after what else has happened.
            self._set_timer(min(self._times.values()))
