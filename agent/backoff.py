"""How often: a bucket of tokens for steady work, and growing delays after failures."""

import asyncio
import random
from collections.abc import Callable

Jitter = Callable[[], float]
"""A number from 0 to below 1, another one each time."""


class Bucket:
    """At most `burst` at once, and `per_second` in the long run."""

    def __init__(self, *, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at: float | None = None

    def seconds_until_next(self) -> float:
        """0 when a token is there now."""
        self._fill()
        return max(0.0, (1.0 - self._tokens) / self._per_second)

    def take(self) -> None:
        """Take a token, even one that is still to come."""
        self._fill()
        self._tokens -= 1.0

    async def wait(self) -> None:
        """Take a token, and wait until it has come. Who asks first is served first."""
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
    """Delays that double from `base_seconds` to `cap_seconds`, each half to one and a half times as
    long, so that a cluster's agents do not come back all at once."""

    def __init__(
        self, *, base_seconds: float, cap_seconds: float, jitter: Jitter = random.random
    ) -> None:
        self._base_seconds = base_seconds
        self._cap_seconds = cap_seconds
        self._jitter = jitter
        self._failures = 0

    def next_seconds(self) -> float:
        """How long to wait after one more failure."""
        # Beyond 2^32 times the base every cap is reached; the number itself must not grow for ever.
        seconds = min(self._cap_seconds, self._base_seconds * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return seconds * (0.5 + self._jitter())

    def reset(self) -> None:
        """It works again."""
        self._failures = 0
