"""What each source says of a pod, and whose word counts: no I/O, no clock."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from agent import labels
from agent.client import podinfo_pb2
from agent.kube import objects
from agent.kube.objects import ApiPod
from agent.pods import conditions
from agent.pods.pod import Pod

PODGATE: Final = podinfo_pb2.CONDITION_SOURCE_PODGATE
KUBELET: Final = podinfo_pb2.CONDITION_SOURCE_KUBELET
API: Final = podinfo_pb2.CONDITION_SOURCE_API

# What the kubelet itself computes, so that its word is never older than the API server's
# (pkg/kubelet/types/pod_status.go: PodConditionByKubelet).
_BY_KUBELET: Final = frozenset(
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
_OURS: Final = f"{labels.DOMAIN}/"


class Known(NamedTuple):
    """One pod by all who know it. is_confirmed: whether the API server has told `of_api` to this
    agent; else it is what an earlier one saved."""

    pod: Pod | None = None
    of_api: ApiPod | None = None
    of_kubelet: ApiPod | None = None
    own: tuple[conditions.Condition, ...] = ()
    is_confirmed: bool = True

    @property
    def newer(self) -> ApiPod | None:
        """Of the two objects the newer one."""
        return objects.newest(self.of_api, self.of_kubelet)


class Said(NamedTuple):
    """One condition as somebody said it; times as RFC 3339, empty where there is none."""

    source: int
    type: str
    status: str
    reason: str
    message: str
    probed: str
    since: str


def all_said(known: Known) -> Iterator[Said]:
    """Every condition by everybody who says it."""
    for one in known.own:
        since = one.last_transition_time.isoformat()
        yield Said(PODGATE, one.type, one.status, one.reason, one.message, "", since)
    for source, pod in ((KUBELET, known.of_kubelet), (API, known.of_api)):
        for other in pod.status.conditions if pod else ():
            yield Said(
                source,
                other.type,
                other.status,
                other.reason,
                other.message,
                other.last_probe_time or "",
                other.last_transition_time or "",
            )


def believed(known: Known) -> list[Said]:
    """For each type, in order, the word that counts.

    podgate's for its own conditions, the kubelet's for those that it computes; of others both have
    copies, and the newer object's counts.
    """
    newer = KUBELET if known.newer is known.of_kubelet else API
    found: dict[str, Said] = {}
    for said in all_said(known):
        best = found.setdefault(said.type, said)
        order = _order(said.type, newer)
        if order.index(said.source) < order.index(best.source):
            found[said.type] = said
    return [found[kind] for kind in sorted(found)]


def _order(kind: str, newer: int) -> tuple[int, ...]:
    if kind in _BY_KUBELET:
        return (KUBELET, API, PODGATE)
    others = (newer, KUBELET, API)
    return (PODGATE, *others) if kind.startswith(_OURS) else (*others, PODGATE)


def identity(known: Known) -> tuple[str, str, str]:
    """The runtime's uid, the namespace and the name."""
    if found := known.newer:
        return found.uid, found.metadata.namespace, found.metadata.name
    assert known.pod is not None  # nobody else could have named it
    return known.pod.uid, known.pod.namespace, known.pod.name


def is_static(known: Known) -> bool:
    """The kubelet's own object of a static pod has no version: no API server ever stored it."""
    if known.of_api is not None:
        return known.of_api.is_mirror
    return known.of_kubelet is not None and not known.of_kubelet.metadata.resource_version


def mirror_uid(known: Known) -> str:
    """The API's uid of a static pod, else nothing."""
    return known.of_api.metadata.uid if known.of_api and known.of_api.is_mirror else ""


def uids(known: Known) -> tuple[str, ...]:
    """All by which the pod may be asked for."""
    own, _, _ = identity(known)
    return tuple(uid for uid in (own, mirror_uid(known)) if uid)


def text(of: str) -> str:
    """As UTF-8 can have it: manifests may hold halves of surrogate pairs."""
    return of.encode("utf-8", "replace").decode("utf-8")
