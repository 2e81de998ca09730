"""Merges what each source reports of a pod: no I/O, no clock."""

import dataclasses
from collections.abc import Iterator

from agent import labels
from agent.client import podinfo_pb2
from agent.kube import objects
from agent.kube.objects import ApiPod
from agent.pods import conditions
from agent.pods.pod import Pod

PODGATE = podinfo_pb2.CONDITION_SOURCE_PODGATE
KUBELET = podinfo_pb2.CONDITION_SOURCE_KUBELET
API = podinfo_pb2.CONDITION_SOURCE_API

# The kubelet itself computes these, so its report is never older than the API server's
# (pkg/kubelet/types/pod_status.go: PodConditionByKubelet).
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
_OURS = f"{labels.DOMAIN}/"


@dataclasses.dataclass(frozen=True, slots=True)
class PodRecord:
    """One pod from all sources. is_confirmed: whether this agent has received `of_api` from the API
    server; otherwise a previous agent saved it."""

    pod: Pod | None = None
    of_api: ApiPod | None = None
    of_kubelet: ApiPod | None = None
    own: tuple[conditions.Condition, ...] = ()
    is_confirmed: bool = True

    @property
    def newer(self) -> ApiPod | None:
        """The object with the newer version; the API server's in doubt."""
        return objects.newest(self.of_api, self.of_kubelet)

    @property
    def identity(self) -> tuple[str, str, str]:
        """The runtime's uid, the namespace and the name."""
        if found := self.newer:
            return found.uid, found.metadata.namespace, found.metadata.name
        assert self.pod is not None  # a record has at least one source
        return self.pod.uid, self.pod.namespace, self.pod.name

    @property
    def is_static(self) -> bool:
        """The kubelet's own object of a static pod has no version: no API server ever stored it."""
        if self.of_api is not None:
            return self.of_api.is_mirror
        return self.of_kubelet is not None and not self.of_kubelet.metadata.resource_version

    @property
    def mirror_uid(self) -> str:
        """The API's uid of a static pod, else empty."""
        return self.of_api.metadata.uid if self.of_api and self.of_api.is_mirror else ""

    @property
    def uids(self) -> tuple[str, ...]:
        """All uids by which clients may request the pod, the runtime's first."""
        return tuple(uid for uid in (self.identity[0], self.mirror_uid) if uid)


@dataclasses.dataclass(frozen=True, slots=True)
class ReportedCondition:
    """One condition as one source reports it; times as RFC 3339, empty if there is none."""

    source: int
    type: str
    status: str
    reason: str
    message: str
    last_probe_time: str
    last_transition_time: str


def reported_conditions(record: PodRecord) -> Iterator[ReportedCondition]:
    """Every condition from every source that reports it."""
    for own in record.own:
        changed_at = own.last_transition_time.isoformat()
        yield ReportedCondition(
            PODGATE, own.type, own.status, own.reason, own.message, "", changed_at
        )
    for source, pod in ((KUBELET, record.of_kubelet), (API, record.of_api)):
        for condition in pod.status.conditions if pod else ():
            yield ReportedCondition(
                source,
                condition.type,
                condition.status,
                condition.reason,
                condition.message,
                condition.last_probe_time or "",
                condition.last_transition_time or "",
            )


def effective_conditions(record: PodRecord) -> list[ReportedCondition]:
    """One condition of each type, sorted by type.

    podgate's for its own conditions, the kubelet's for those that it computes. Of others both the
    kubelet and the API server have copies, and the newer object's counts.
    """
    newer = KUBELET if record.newer is record.of_kubelet else API
    found: dict[str, ReportedCondition] = {}
    for reported in reported_conditions(record):
        best = found.setdefault(reported.type, reported)
        order = _order(reported.type, newer)
        if order.index(reported.source) < order.index(best.source):
            found[reported.type] = reported
    return [found[kind] for kind in sorted(found)]


def _order(kind: str, newer: int) -> tuple[int, ...]:
    if kind in _BY_KUBELET:
        return (KUBELET, API, PODGATE)
    others = (newer, KUBELET, API)
    return (PODGATE, *others) if kind.startswith(_OURS) else (*others, PODGATE)


def utf8_safe(text: str) -> str:
    """The text as UTF-8 can encode it: manifests may contain unpaired surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")
