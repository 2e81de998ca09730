"""Paced marks: a pod that changes its own network again and again delays no other pod."""

import asyncio

from agent.backoff import Pace
from agent.pods.changes import Subscription

# A CNI sets up an interface in about five steps, and IPv6 finishes its addresses 2 s later.
_AT_ONCE = 8
_BASE_SECONDS, _CAP_SECONDS = 0.5, 10.0


class PacedMarks:
    """Marks pods in a subscription, each at its own pace.

    A mark that comes too early waits, so that the last change of a pod is always reconciled.
    """

    def __init__(self, marks: Subscription) -> None:
        self._marks = marks
        self._paces: dict[str, Pace] = {}
        self._due: dict[str, float] = {}

    def mark(self, uid: str) -> None:
        """Record that this pod changed: mark it now or, if it changes all the time, later."""
        now = asyncio.get_running_loop().time()
        pace = self._paces.setdefault(
            uid, Pace(at_once=_AT_ONCE, base_seconds=_BASE_SECONDS, cap_seconds=_CAP_SECONDS)
        )
        due = pace.happened(now)
        if due <= now:
            pace.handled(now)
            self._marks.mark(uid)
        elif uid not in self._due:
            self._due[uid] = due
            self._marks.changed.set()

    def mark_due(self) -> float | None:
        """Mark the pods that are due. Returns when the next one is, by the event loop's clock."""
        now = asyncio.get_running_loop().time()
        for uid in [uid for uid, due in self._due.items() if due <= now]:
            del self._due[uid]
            self._paces[uid].handled(now)
            self._marks.mark(uid)
        return min(self._due.values(), default=None)

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._paces.pop(uid, None)
        self._due.pop(uid, None)
