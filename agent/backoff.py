"""Rate limits and delays: a token bucket, a back-off after failures, a pace of repetitions."""

import asyncio
import random
from collections.abc import Callable

Jitter = Callable[[], float]
"""A number from 0 to below 1, another one each time."""


def no_jitter() -> float:
    """For delays that must be exact, or that no other agent shares."""
    return 0.5


class Bucket:
    """Token bucket: `burst` requests at once, `per_second` in the long run."""

    def __init__(self, *, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at: float | None = None

    def seconds_until_next(self) -> float:
        """0 if a token is available now."""
        self._fill()
        return max(0.0, (1.0 - self._tokens) / self._per_second)

    def take(self) -> None:
        """Take a token, even one that is not available yet."""
        self._fill()
        self._tokens -= 1.0

    async def wait(self) -> None:
        """Take a token and wait until it is available: first come, first served."""
        seconds = self.seconds_until_next()
        self.take()
        await asyncio.sleep(seconds)

    def _fill(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._filled_at is not None:
            gained = (now - self._filled_at) * self._per_second
            self._tokens = min(float(self._burst), self._tokens + gained)
        self._filled_at = now


class Backoff:
    """Delays that double from `base_seconds` to `cap_seconds`, times 0.5 to 1.5.

    The jitter keeps a cluster's agents from retrying all at the same time.
    """

    def __init__(
        self, *, base_seconds: float, cap_seconds: float, jitter: Jitter = random.random
    ) -> None:
        self._base_seconds = base_seconds
        self._cap_seconds = cap_seconds
        self._jitter = jitter
        self.failures = 0
        """Delays since the last reset."""

    def next_seconds(self) -> float:
        """The delay after one more failure."""
        # Every cap is reached before 2^32 times the base; the power must not grow without bound.
        seconds = min(self._cap_seconds, self._base_seconds * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return seconds * (0.5 + self._jitter())

    def reset(self) -> None:
        """Start again from `base_seconds`, after a success."""
        self.failures = 0


class Pace:
    """When something that happens again and again is handled.

    The first `at_once` times without a delay, then after delays that double from `base_seconds` to
    `cap_seconds`. Once it has not happened for `cap_seconds`, it starts again.
    """

    def __init__(self, *, at_once: int, base_seconds: float, cap_seconds: float) -> None:
        self._at_once = at_once
        self._base_seconds = base_seconds
        self._cap_seconds = cap_seconds
        self._handled = 0
        self._happened_at = float("-inf")
        self._due_at = float("-inf")

    def happened(self, now: float) -> float:
        """Record that it happened. Returns when it may be handled: `now`, or later."""
        if now - self._happened_at >= self._cap_seconds and now >= self._due_at:
            self._handled = 0
        self._happened_at = now
        return max(now, self._due_at)

    def handled(self, now: float) -> None:
        """Record that it was handled, which sets when it may be handled next."""
        self._handled += 1
        doublings = self._handled - self._at_once
        seconds = self._base_seconds * 2.0 ** min(doublings, 32) if doublings >= 0 else 0.0
        self._due_at = now + min(self._cap_seconds, seconds)
