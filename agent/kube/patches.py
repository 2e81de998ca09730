"""Patches of pod conditions, and what the API server's errors mean for them. No I/O.

One strategic-merge patch of `pods/status` carries all conditions: the list merges by type, so the
kubelet's stay (it keeps all conditions that are not its own). The uid in the patch restricts it to
this pod: for another pod of the same name the API server responds with 422 for `metadata.uid`.
"""

import datetime
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from agent import labels
from agent.kube.client import ApiError
from agent.kube.objects import ApiPod, PodCondition
from agent.kube.pod_reports import transition_time
from agent.pods import isolation
from agent.pods.conditions import FALSE, TRUE, TYPES, Condition
from agent.pods.pod import SANDBOX_MISSING

SANDBOX_CHANGED: Final = "SandboxChanged"

# A message for people, in an object that every controller of the cluster may hold.
_MAX_MESSAGE = 1024
_UNKNOWN = "unknown"
_STAMP = re.compile(r" \(sandbox (\S+), boot (\S+)\)$")


class SandboxStamp(msgspec.Struct, frozen=True):
    """The sandbox that a condition is about, at the end of its message.

    Conditions outlive reboots and sandboxes, but are true for one sandbox only. sandbox: empty if
    unknown; boot: the kernel's boot id.
    """

    sandbox: str
    boot: str

    def __str__(self) -> str:
        return f" (sandbox {self.sandbox or _UNKNOWN}, boot {self.boot})"


class Difference(enum.IntEnum):
    """How much the API's conditions differ from the desired ones."""

    NONE = 0
    TEXT = 1
    """Only messages or observedGeneration: no controller decides by them."""
    FALLBACK = 2
    """Strict has fallen back to enforce, both True."""
    STATE = 3
    """A status or a reason; or a condition is missing."""


def stamp_of(condition: PodCondition) -> SandboxStamp | None:
    """The stamp at the end of a condition's message, if it has one."""
    found = _STAMP.search(condition.message)
    if not found:
        return None
    sandbox, boot = found.groups()
    return SandboxStamp("" if sandbox == _UNKNOWN else sandbox, boot)


def without_stamp(condition: PodCondition) -> str:
    """A condition's message as it was before podgate wrote it."""
    return _STAMP.sub("", condition.message)


def is_stale(condition: PodCondition, now: SandboxStamp) -> bool:
    """Whether a condition is about another sandbox than the pod's current one."""
    stamp = stamp_of(condition)
    if stamp is None:
        return False
    return stamp.boot != now.boot or bool(now.sandbox and stamp.sandbox != now.sandbox)


def true_since(pod: ApiPod, kind: str, now: SandboxStamp) -> float | None:
    """Since when, as Unix time in whole seconds, a condition in the API is True of the pod's
    current sandbox; None if it is not, or the sandbox is not known."""
    condition = pod.condition(kind)
    if condition is None or condition.status != TRUE:
        return None
    if not now.sandbox or stamp_of(condition) != now:
        return None
    changed = transition_time(condition)
    return changed.timestamp() if changed else None


def desired_conditions(
    pod: ApiPod, own: Iterable[Condition], now: SandboxStamp, *, kinds: Sequence[str] = TYPES
) -> tuple[PodCondition, ...]:
    """The conditions that the pod should have. own: podgate's, and those of others that it keeps
    there; now: the current sandbox; kinds: podgate's types to write for this pod.

    A condition that podgate has not computed yet stays as it is in the API, unless it is about a
    deleted sandbox: then it is False until it is computed.
    """
    current = {one.type: one for one in own if one.type in kinds or one.type not in TYPES}
    found = []
    for kind in dict.fromkeys((*kinds, *current)):
        actual = pod.condition(kind)
        if condition := current.get(kind):
            status, reason, text = condition.status, condition.reason, condition.message
            found.append(_condition(pod, kind, status, reason, text, now, condition))
        elif actual and is_stale(actual, now):
            text = (
                "The previous condition belongs to a deleted sandbox; the new one is being checked."
            )
            found.append(_condition(pod, kind, FALSE, SANDBOX_CHANGED, text, now, None))
    return tuple(found)


def written_for_others(pod: ApiPod) -> list[PodCondition]:
    """Conditions of other domains that podgate has written, by their stamp."""
    return [one for one in pod.status.conditions if not _is_podgates(one.type) and stamp_of(one)]


def difference(pod: ApiPod, conditions: Sequence[PodCondition]) -> Difference:
    """The largest difference between the pod's conditions and these."""
    found = (_difference(pod.condition(desired.type), desired) for desired in conditions)
    return max(found, default=Difference.NONE)


def changes_readiness(pod: ApiPod, conditions: Sequence[PodCondition]) -> bool:
    """Whether the conditions change if all readiness gates of the pod that podgate writes are
    True."""
    written = {*TYPES, *(condition.type for condition in conditions)}
    kinds = pod.gates.intersection(written) or TYPES
    before = {condition.type: condition for condition in pod.status.conditions}
    after = before | {condition.type: condition for condition in conditions}
    return _are_true(before, kinds) != _are_true(after, kinds)


def may_become_true(conditions: Sequence[PodCondition]) -> bool:
    """Whether one of these is False and may be True in a moment: the pod has a sandbox."""
    reasons = {condition.reason for condition in conditions if condition.status != TRUE}
    return bool(reasons) and SANDBOX_MISSING not in reasons


def isolates(pod: ApiPod, conditions: Sequence[PodCondition]) -> bool:
    """Whether the pod waits for the condition `isolation-ready`, and these are the first to report
    it as True."""
    kind = labels.ISOLATION_READY
    actual = pod.condition(kind)
    is_waiting = kind in pod.gates and (actual is None or actual.status != TRUE)
    return is_waiting and _are_true({one.type: one for one in conditions}, [kind])


def body(
    pod: ApiPod, conditions: Sequence[PodCondition], withdrawn: Iterable[str] = ()
) -> dict[str, object]:
    """The patch, for plain JSON. withdrawn: types to delete."""
    deleted = [{"type": kind, "$patch": "delete"} for kind in withdrawn]
    return {
        "metadata": {"uid": pod.metadata.uid},
        "status": {"conditions": [*msgspec.to_builtins(conditions), *deleted]},
    }


def path(pod: ApiPod) -> str:
    metadata = pod.metadata
    return f"/api/v1/namespaces/{metadata.namespace}/pods/{metadata.name}/status"


def is_pod_replaced(error: ApiError) -> bool:
    """Whether the pod was deleted; another pod may have its name."""
    is_other_uid = error.code == 422 and any(field == "metadata.uid" for field, _ in error.causes)
    return error.code in (404, 409) or is_other_uid


def _condition(
    pod: ApiPod,
    kind: str,
    status: str,
    reason: str,
    message: str,
    now: SandboxStamp,
    own: Condition | None,
) -> PodCondition:
    stamp = str(now)
    actual = pod.condition(kind)
    if actual and actual.status == status and actual.last_transition_time:
        since = actual.last_transition_time
    else:
        moment = own.last_transition_time if own else datetime.datetime.now(datetime.UTC)
        since = moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return PodCondition(
        type=kind,
        status=status,
        reason=reason,
        message=message[: _MAX_MESSAGE - len(stamp)] + stamp,
        last_transition_time=since,
        observed_generation=pod.metadata.generation or None,
    )


def _is_podgates(kind: str) -> bool:
    return kind.startswith(f"{labels.DOMAIN}/")


def _are_true(conditions: Mapping[str, PodCondition], kinds: Iterable[str]) -> bool:
    return all(kind in conditions and conditions[kind].status == TRUE for kind in kinds)


def _difference(actual: PodCondition | None, desired: PodCondition) -> Difference:
    if actual is None or actual.status != desired.status:
        return Difference.STATE
    if actual.reason != desired.reason:
        has_fallen_back = (actual.reason, desired.reason) == (isolation.STRICT, isolation.ENFORCED)
        return Difference.FALLBACK if has_fallen_back else Difference.STATE
    # A server without this field drops it each time; writing it again would never end.
    is_dropped = actual.observed_generation is None
    is_same_generation = is_dropped or actual.observed_generation == desired.observed_generation
    if actual.message == desired.message and is_same_generation:
        return Difference.NONE
    return Difference.TEXT
