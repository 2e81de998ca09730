"""Start times of new probes after a start on a full node: spread evenly, not all at once."""

from collections.abc import Callable

# The golden ratio's multiples fill an interval evenly, however many there are.
_GOLDEN = 0.6180339887498949


class Spread:
    """Gives out starting times; once its seconds are over, that is now."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._until = clock() + seconds if seconds else None
        self._count = 0

    def next(self) -> float:
        """When the next new probe may begin, on the clock."""
        now = self._clock()
        if self._until is None or now >= self._until:
            return now
        self._count += 1
        # Never before now: probes that come late in the interval share the rest of it.
        return now + self._count * _GOLDEN % 1.0 * (self._until - now)
