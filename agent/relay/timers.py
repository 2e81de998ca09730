"""What the relay does again and again, in as few wake-ups as possible."""

from collections.abc import Callable, Mapping

# Multiples of a period are when the agent tries the way to this relay (`agent.tasks.tick`), which
# wakes it. Timers are due a little later, and run with an event that comes shortly before.
_AFTER_SECONDS = 0.01
EARLY_SECONDS = 0.02
# Of a period: multiples are no exact fractions.
_ROUNDING = 0.01

Timer = Callable[[], None]


class Timers:
    """Each is due at multiples of its period, so those with several periods are due together."""

    def __init__(self, seconds: Mapping[Timer, float], now: Callable[[], float]) -> None:
        """seconds: the period of each; all are due at once, in this order."""
        self._seconds = dict(seconds)
        self._now = now
        self._due = dict.fromkeys(self._seconds, 0.0)
        self.late_seconds = 0.0
        """How late the last ones ran."""

    def next_due(self) -> float:
        """When the next one is due."""
        return min(self._due.values())

    def run(self) -> None:
        """Run those that are due, or soon. A timer may change periods."""
        now = self._now()
        first = self.next_due()
        self.late_seconds = now - first if first else 0.0
        for timer, due in self._due.items():
            if now >= due - EARLY_SECONDS:
                timer()
                self._due[timer] = self._after(max(due, now), self._seconds[timer])

    def set_period(self, timer: Timer, seconds: float) -> None:
        """From the next time on."""
        self._seconds[timer] = seconds

    @staticmethod
    def _after(time: float, seconds: float) -> float:
        passed = (time - _AFTER_SECONDS) / seconds + _ROUNDING
        return (passed // 1 + 1) * seconds + _AFTER_SECONDS
