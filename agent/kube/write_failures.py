"""Whose failures failed writes are: one pod's, or the API server's. For the event loop, no I/O.

While the API server cannot be reached, one pod tries for all. But an error may be about one pod
only: it is near etcd's limit of size, or a webhook of its namespace is away. So

* an error that overload and outages never have is the pod's, until three pods in a row have failed;
* any other error is the server's, until other pods succeed: from then on it is the pod's;
* after a failure another pod tries, and sooner if it has been written before: it shows which it is.
"""

import random

from agent import backoff
from agent.kube.client import ApiError

# No response, credentials, overload, and what gateways and a starting server respond. Any other
# 5xx is a response to one request.
_OF_THE_SERVER = (0, 401, 429, 502, 503, 504)
_PODS_IN_A_ROW = 3
# A pod that has been written before, and has not failed yet, tries after this time, once.
_TRY_SECONDS = 5.0
TICK_SECONDS = 0.001
"""How much too early a timer may end."""


class WriteFailures:
    """Results of the writes of pods, which are named by uid. Times are the event loop's."""

    def __init__(self, jitter: backoff.Jitter = random.random) -> None:
        self.problem = ""
        """The server's last error; empty while writes succeed."""
        self._backoff = backoff.Backoff(base_seconds=1.0, cap_seconds=30.0, jitter=jitter)
        self._resume_at = self._try_at = 0.0
        self._failed_at: dict[str, float] = {}
        """When a pod's writes started to fail."""
        self._written = set[str]()
        self._in_a_row = set[str]()
        """Pods that failed since the last success of any."""
        self._succeeded_at = float("-inf")

    def forget(self, uid: str) -> None:
        """The pod was deleted."""
        self._failed_at.pop(uid, None)
        self._written.discard(uid)
        self._in_a_row.discard(uid)

    def is_failing(self, uid: str) -> bool:
        """Whether other pods were written since this pod's writes started to fail."""
        failed_at = self._failed_at.get(uid)
        return failed_at is not None and self._succeeded_at > failed_at

    def resume_at(self, uid: str) -> float:
        """When this pod may be tried, after failures of others."""
        shows = uid in self._written and uid not in self._in_a_row
        return self._try_at if shows else self._resume_at

    def order(self, uid: str) -> tuple[bool, bool]:
        """Of pods that are due, the one with the least is tried first."""
        return uid in self._in_a_row, bool(self.problem) and uid not in self._written

    def succeed(self, uid: str, now: float) -> None:
        """A pod was written."""
        self._failed_at.pop(uid, None)
        self._written.add(uid)
        self._in_a_row.clear()
        self._succeeded_at = now
        self._backoff.reset()
        self._resume_at = self._try_at = 0.0
        self.problem = ""

    def fail(self, uid: str, error: ApiError, now: float) -> bool:
        """A write failed by a transient error. Returns whether it is the server's, which then gets
        a pause; otherwise this pod is to be tried later."""
        if self.is_failing(uid):
            return False
        self._failed_at.setdefault(uid, now)
        self._in_a_row.add(uid)
        if error.code not in _OF_THE_SERVER and len(self._in_a_row) < _PODS_IN_A_ROW:
            return False
        self.problem = str(error)
        # Requests in flight at the same time are one failure.
        if now + TICK_SECONDS >= self._resume_at:
            seconds = max(error.retry_after_seconds, self._backoff.next_seconds())
            self._resume_at = now + seconds
        if now + TICK_SECONDS >= self._try_at:
            seconds = max(error.retry_after_seconds, _TRY_SECONDS)
            self._try_at = min(self._resume_at, now + seconds)
        return True
