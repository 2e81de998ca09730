"""Pod conditions: status, reason and last transition time, per pod and type."""

import datetime
from collections.abc import Callable
from typing import Literal

import msgspec
import structlog

from agent import labels
from agent.logs import Event
from agent.pods.changes import Changes
from agent.pods.pod import Pod

log = structlog.get_logger(__name__)

TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"

TYPES = (labels.ISOLATION_READY, labels.PROBES_PASSING, labels.POLICY_READY)
"""podgate's own. Conditions of other types are those that owners report (agent/api/conditions)."""


_PROBLEMS = frozenset(
    {"NetnsMissing", "NetnsInvalid", "NetnsInUse", "GateFailed", "GateBypassed", "ProbeFailing"}
)
_WITHOUT_SANDBOX = frozenset({"SandboxMissing", "NetnsNotFound"})


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """One condition, with the fields of v1.PodCondition."""

    type: str
    status: str
    reason: str
    message: str
    last_transition_time: datetime.datetime
    """When `status` (not reason or message) last changed, in UTC."""


def level_of(before: Condition | None, now: Condition, pod: Pod) -> Literal["info", "warning"]:
    """The log level of a change: a warning is a problem that an operator may have to solve.

    What a pod waits for while it starts, or loses while it is deleted, is none; nor is what
    others report, who log it themselves.
    """
    if pod.is_deleting or now.reason in _WITHOUT_SANDBOX or now.type not in TYPES:
        return "info"
    problem = pod.manifest_problem
    is_invalid = problem is not None and problem.reason not in _WITHOUT_SANDBOX
    has_invalid_probe = now.type == labels.PROBES_PASSING and bool(pod.spec.errors)
    if is_invalid or has_invalid_probe or now.reason in _PROBLEMS:
        return "warning"
    has_become_false = before is not None and before.status == TRUE and now.status == FALSE
    return "warning" if has_become_false else "info"


class Conditions:
    """The newest condition of each type of each pod. Every change is one log line."""

    def __init__(self, *, now: Callable[[], datetime.datetime] | None = None) -> None:
        self.changes = Changes()
        """Pods of which anything about a condition changed."""
        self._now = now or (lambda: datetime.datetime.now(datetime.UTC))
        self._by_pod: dict[str, dict[str, Condition]] = {}

    def set(
        self,
        pod: Pod,
        kind: str,
        status: str,
        reason: str,
        message: str,
        *,
        since: datetime.datetime | None = None,
    ) -> bool:
        """Record what is true now; whether anything about it changed. since: when the status
        changed, if that is known from before."""
        conditions = self._by_pod.setdefault(pod.uid, {})
        before = conditions.get(kind)
        if before and (before.status, before.reason, before.message) == (status, reason, message):
            return False
        same_status = before is not None and before.status == status
        if since is None:
            since = before.last_transition_time if before and same_status else self._now()
        conditions[kind] = Condition(kind, status, reason, message, since)
        self.changes.mark(pod.uid)
        level = level_of(before, conditions[kind], pod)
        (log.warning if level == "warning" else log.info)(
            Event.CONDITION_CHANGED,
            pod=pod.full_name,
            uid=pod.uid,
            type=kind,
            status=status,
            reason=reason,
            detail=message,
            was=before.status if before else None,
        )
        return True

    def of(self, uid: str) -> list[Condition]:
        """The pod's conditions in the order of `TYPES`, then those of others by type."""
        conditions = self._by_pod.get(uid, {})
        others = sorted(conditions.keys() - set(TYPES))
        return [conditions[kind] for kind in (*TYPES, *others) if kind in conditions]

    def get(self, uid: str, kind: str) -> Condition | None:
        return self._by_pod.get(uid, {}).get(kind)

    def remove(self, uid: str, kind: str) -> None:
        """The pod has no condition of this type any more."""
        if self._by_pod.get(uid, {}).pop(kind, None):
            self.changes.mark(uid)
            log.info(Event.CONDITION_REMOVED, uid=uid, type=kind)

    def forget(self, uid: str) -> None:
        self._by_pod.pop(uid, None)
