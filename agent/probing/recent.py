"""Durations of the newest probes, for the status page."""

import collections
from collections.abc import Iterable

from probes.engine.scheduler import ProbeKey
from probes.results import ProbeOutcome

# As many as a chart in a table's cell shows; 250 pods with two probes each keep half a megabyte.
_KEPT = 30


class RecentProbes:
    """By probe. All in memory: a restarted agent starts again."""

    def __init__(self) -> None:
        self._by_pod: dict[str, dict[ProbeKey, collections.deque[float | None]]] = {}

    def add(self, key: ProbeKey, outcome: ProbeOutcome) -> None:
        self._kept(key).append(outcome.duration_seconds if outcome.passed else None)

    def add_successes(self, key: ProbeKey, seconds: Iterable[float]) -> None:
        """By their durations, the oldest first."""
        self._kept(key).extend(seconds)

    def _kept(self, key: ProbeKey) -> collections.deque[float | None]:
        probes = self._by_pod.setdefault(key.uid, {})
        return probes.setdefault(key, collections.deque(maxlen=_KEPT))

    def of(self, key: ProbeKey) -> list[float | None]:
        """In milliseconds, the oldest first; None for one that failed."""
        kept = self._by_pod.get(key.uid, {}).get(key, ())
        return [None if seconds is None else round(seconds * 1000, 3) for seconds in kept]

    def forget(self, uid: str) -> None:
        """Of a removed pod."""
        self._by_pod.pop(uid, None)
