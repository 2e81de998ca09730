"""What a PATCH of conditions says, and what its answer means; no I/O.

One strategic-merge patch of `pods/status` carries both conditions: the list merges by type, so the
kubelet's stay (it keeps every condition that is not its own). The uid in the patch holds it to this
very pod: for another one of the same name the API server answers 422 for `metadata.uid`.
"""

import datetime
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from agent.kube.client import ApiError
from agent.kube.objects import ApiPod, PodCondition
from agent.pods.conditions import FALSE, TRUE, TYPES, Condition

SANDBOX_CHANGED: Final = "SandboxChanged"

# A message for people, in an object that every controller of the cluster may hold.
_MAX_MESSAGE = 1024
_UNKNOWN = "unknown"
_STAMP = re.compile(r" \(sandbox (\S+), boot (\S+)\)$")


class SandboxStamp(msgspec.Struct, frozen=True):
    """Which sandbox a condition speaks of. Conditions outlive reboots and sandboxes; what they say
    does not. sandbox: empty when it is not known; boot: the kernel's boot id."""

    sandbox: str
    boot: str

    def __str__(self) -> str:
        return f" (sandbox {self.sandbox or _UNKNOWN}, boot {self.boot})"


class Difference(enum.IntEnum):
    """How far the API's conditions are from what is true."""

    NONE = 0
    TEXT = 1
    """Only messages, or the generation that was judged: no decision hangs on them."""
    STATE = 2
    """A status or a reason; or a condition is missing."""


def stamp_of(condition: PodCondition) -> SandboxStamp | None:
    """The stamp at the end of a condition's message; None for one that has none."""
    found = _STAMP.search(condition.message)
    if not found:
        return None
    sandbox, boot = found.groups()
    return SandboxStamp("" if sandbox == _UNKNOWN else sandbox, boot)


def is_stale(condition: PodCondition, now: SandboxStamp) -> bool:
    """Whether a condition speaks of another sandbox than the pod's present one."""
    said = stamp_of(condition)
    if said is None:
        return False
    return said.boot != now.boot or bool(now.sandbox and said.sandbox != now.sandbox)


def desired_conditions(
    pod: ApiPod, own: Iterable[Condition], now: SandboxStamp
) -> tuple[PodCondition, ...]:
    """The conditions that the pod should have. own: what is known of it; now: its sandbox.

    What is not known yet is left as it is, but where it speaks of a sandbox that is gone: that is
    said to be False until it is known.
    """
    known = {one.type: one for one in own}
    found = []
    for kind in TYPES:
        actual = pod.condition(kind)
        if kind in known:
            one = known[kind]
            found.append(_condition(pod, kind, one.status, one.reason, one.message, now, one))
        elif actual and is_stale(actual, now):
            text = "What was said here was of a sandbox that is gone; it is being judged anew."
            found.append(_condition(pod, kind, FALSE, SANDBOX_CHANGED, text, now, None))
    return tuple(found)


def difference(pod: ApiPod, conditions: Sequence[PodCondition]) -> Difference:
    """The largest difference between the pod's conditions and these."""
    found = (_difference(pod.condition(one.type), one) for one in conditions)
    return max(found, default=Difference.NONE)


def changes_readiness(pod: ApiPod, conditions: Sequence[PodCondition]) -> bool:
    """Whether these make a pod ready that was not, or the other way round, as far as it is
    podgate's to say: all of its gates that are podgate's are True."""
    kinds = pod.gates.intersection(TYPES) or TYPES
    now = {one.type: one for one in pod.status.conditions}
    then = now | {one.type: one for one in conditions}
    return _are_true(now, kinds) != _are_true(then, kinds)


def body(pod: ApiPod, conditions: Sequence[PodCondition]) -> dict[str, object]:
    """The patch, for plain JSON."""
    return {
        "metadata": {"uid": pod.metadata.uid},
        "status": {"conditions": msgspec.to_builtins(conditions)},
    }


def path(pod: ApiPod) -> str:
    metadata = pod.metadata
    return f"/api/v1/namespaces/{metadata.namespace}/pods/{metadata.name}/status"


def is_pod_replaced(error: ApiError) -> bool:
    """Whether the pod that was meant is gone; another one may have its name."""
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


def _are_true(conditions: Mapping[str, PodCondition], kinds: Iterable[str]) -> bool:
    return all(kind in conditions and conditions[kind].status == TRUE for kind in kinds)


def _difference(actual: PodCondition | None, one: PodCondition) -> Difference:
    if actual is None or (actual.status, actual.reason) != (one.status, one.reason):
        return Difference.STATE
    # Servers that do not know the field drop it; written again and again it would never be there.
    is_dropped = actual.observed_generation is None
    is_same_generation = is_dropped or actual.observed_generation == one.observed_generation
    if actual.message == one.message and is_same_generation:
        return Difference.NONE
    return Difference.TEXT
