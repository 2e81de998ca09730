"""Limits per user: how often a user calls, and how much it has open."""

import collections
import contextlib
from collections.abc import Iterator

from agent.backoff import Bucket

# A user who is dropped from the table starts again with a full bucket.
_MAX_USERS = 1024


class UserRates:
    """A token bucket for each user, for the users that called last."""

    def __init__(self, *, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._buckets: collections.OrderedDict[int, Bucket] = collections.OrderedDict()

    @property
    def users(self) -> list[int]:
        """Users with a bucket, the most recent caller last."""
        return list(self._buckets)

    def take(self, user: int) -> bool:
        """Take a token; False if the user's bucket is empty."""
        bucket = self._buckets.pop(user, None)
        bucket = bucket or Bucket(per_second=self._per_second, burst=self._burst)
        self._buckets[user] = bucket
        if len(self._buckets) > _MAX_USERS:
            self._buckets.popitem(last=False)
        if bucket.seconds_until_next() > 0:
            return False
        bucket.take()
        return True


class UserSlots:
    """Counts what each user has open."""

    def __init__(self, maximum: int) -> None:
        """maximum: of each user."""
        self._maximum = maximum
        self._open: collections.Counter[int] = collections.Counter()

    @property
    def total(self) -> int:
        """Open now, of all users."""
        return self._open.total()

    def has_room(self, user: int) -> bool:
        return self._open[user] < self._maximum

    @contextlib.contextmanager
    def hold(self, user: int) -> Iterator[None]:
        """Count one more while inside."""
        self._open[user] += 1
        try:
            yield
        finally:
            self._open[user] -= 1
            if not self._open[user]:
                del self._open[user]
