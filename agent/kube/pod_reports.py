"""One pod as the API server and the kubelet report it, and which report counts. No I/O, no clock.

Both have every condition: the kubelet computes its own and copies the others, the API server gets
them later. The resource version in the kubelet's object is the one that it first saw, and does not
change with the status (pkg/kubelet/config/config.go: checkAndUpdatePod). So conditions are compared
by the time of their last transition.
"""

import dataclasses
import datetime
from typing import Final

import msgspec

from agent.kube import objects
from agent.kube.objects import ApiPod, PodCondition

API: Final = "api"
KUBELET: Final = "kubelet"

_BY_KUBELET = frozenset(
    (
        "PodScheduled",
        "Ready",
        "Initialized",
        "ContainersReady",
        "PodReadyToStartContainers",
        "PodResizeInProgress",
        "PodResizePending",
    )
)
"""Computed by the kubelet alone (pkg/kubelet/types/pod_status.go: PodConditionByKubelet)."""


@dataclasses.dataclass(frozen=True, slots=True)
class PodReports:
    """What each origin last reported of a pod.

    is_confirmed: whether this agent has received `of_api` from the API server; otherwise a previous
    agent saved it. is_current: whether the kubelet's open stream has sent `of_kubelet`; otherwise
    the stream has ended since, or a previous agent saved it.
    """

    of_api: ApiPod | None = None
    of_kubelet: ApiPod | None = None
    is_confirmed: bool = True
    is_current: bool = True

    @property
    def newest(self) -> ApiPod | None:
        """The object with the newer version; the API server's in doubt."""
        return objects.newest(self.of_api, self.of_kubelet)

    @property
    def newest_status(self) -> ApiPod | None:
        """The object with the newer status of containers."""
        return (self.of_kubelet if self.is_current else None) or self.newest

    @property
    def deletion_timestamp(self) -> str | None:
        """When the pod is to be deleted: final, whichever origin reports it."""
        found = [pod.metadata.deletion_timestamp for pod in (self.of_api, self.of_kubelet) if pod]
        return next(filter(None, found), None)

    def origin_of(self, kind: str) -> str:
        """The origin whose condition of this type counts; the only one that has it, else:

        The kubelet's for those that it computes, while it reports the pod. Of others, and after its
        stream has ended, the one with the later transition; if these are equal, the kubelet's for
        those that it computes, and the newer object's for others.
        """
        of_api = self.of_api.condition(kind) if self.of_api else None
        of_kubelet = self.of_kubelet.condition(kind) if self.of_kubelet else None
        if of_api is None or of_kubelet is None:
            return API if of_kubelet is None else KUBELET
        if kind in _BY_KUBELET and self.is_current:
            return KUBELET
        if _is_later(of_api, of_kubelet):
            return API
        if kind in _BY_KUBELET or _is_later(of_kubelet, of_api):
            return KUBELET
        return KUBELET if self.newest is self.of_kubelet else API

    def condition(self, kind: str) -> PodCondition | None:
        """The condition of this type that counts."""
        found = self.of_kubelet if self.origin_of(kind) == KUBELET else self.of_api
        return found.condition(kind) if found else None


def without_unverified(pod: ApiPod, previous: PodReports, started: datetime.datetime) -> ApiPod:
    """A pod from a kubelet that may have just started, without what it cannot have verified yet.

    Such a kubelet reports the API server's old status, or Ready as False at the time of that status
    (Kubernetes 1.37, getEffectivePodStatus in pkg/kubelet/apis/pods). So of the conditions that it
    computes those that differ from `previous` count only if they have changed after `previous`, or
    since `started`, when its stream was opened.
    """
    conditions = tuple(
        _verified(condition, previous.condition(condition.type), started)
        for condition in pod.status.conditions
    )
    status = msgspec.structs.replace(pod.status, conditions=conditions)
    verified = msgspec.structs.replace(pod, status=status)
    # Clients that read the whole pod get the conditions of its reports.
    verified.keep_whole(pod.whole)
    return verified


def _verified(
    condition: PodCondition, previous: PodCondition | None, started: datetime.datetime
) -> PodCondition:
    if (
        condition.type not in _BY_KUBELET
        or previous is None
        or condition.status == previous.status
        or _is_later(condition, previous)
    ):
        return condition
    changed = transition_time(condition)
    # The API has whole seconds.
    is_new = changed is not None and changed >= started.replace(microsecond=0)
    return condition if is_new else previous


def _is_later(condition: PodCondition, other: PodCondition) -> bool:
    """Whether a condition certainly changed after the other."""
    changed, before = transition_time(condition), transition_time(other)
    return changed is not None and before is not None and changed > before


def transition_time(condition: PodCondition) -> datetime.datetime | None:
    """When the condition's status last changed, in whole seconds; None if that is not readable."""
    text = condition.last_transition_time
    try:
        found = datetime.datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return found if found and found.tzinfo else None
