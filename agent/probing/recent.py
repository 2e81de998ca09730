"""Durations of the newest probes, for the status page."""

import collections

from probes.engine.scheduler import ProbeKey
from probes.results import ProbeOutcome

# As many as a chart in a table's cell shows; 250 pods with two probes each keep half a megabyte.
_KEPT = 30


class RecentProbes:
    """By probe. All in memory: a restarted agent starts again."""

    def __init__(self) -> None:
        self._by_pod: dict[str, dict[ProbeKey, collections.deque[float | None]]] = {}

    def add(self, key: ProbeKey, outcome: ProbeOutcome) -> None:
        probes = self._by_pod.setdefault(key.uid, {})
        kept = probes.setdefault(key, collections.deque(maxlen=_KEPT))
        kept.append(round(outcome.duration_seconds * 1000, 3) if outcome.passed else None)

    def of(self, key: ProbeKey) -> list[float | None]:
        """In milliseconds, the oldest first; None for one that failed."""
        return list(self._by_pod.get(key.uid, {}).get(key, ()))

    def forget(self, uid: str) -> None:
        """Of a removed pod."""
        self._by_pod.pop(uid, None)
