"""What each source says of a pod, and which of them is believed: no I/O, no clock of its own."""

import contextlib
import datetime
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from google.protobuf.timestamp_pb2 import Timestamp

from agent import conditions, names
from agent.kube import objects
from agent.kube.objects import ApiPod
from agent.podinfo import podinfo_pb2
from agent.pods import Pod

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
_OURS: Final = f"{names.DOMAIN}/"

_STATUSES: Final = {
    "True": podinfo_pb2.CONDITION_STATUS_TRUE,
    "False": podinfo_pb2.CONDITION_STATUS_FALSE,
    "Unknown": podinfo_pb2.CONDITION_STATUS_UNKNOWN,
}


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
        """Of the two objects the one with the newer version, the API server's if in doubt."""
        if self.of_api is None or self.of_kubelet is None:
            return self.of_api or self.of_kubelet
        version = self.of_kubelet.metadata.resource_version
        if not version or objects.is_older(version, self.of_api.metadata.resource_version):
            return self.of_api
        return self.of_kubelet


class Said(NamedTuple):
    """One condition as somebody said it; times as RFC 3339, empty where there is none."""

    type: str
    status: str
    reason: str
    message: str
    probed: str
    since: str


_Sightings = dict[tuple[int, str], tuple[Said, datetime.datetime | None]]


class Sightings:
    """Since when each condition of one pod has been known as it is now, by source and type."""

    def __init__(self) -> None:
        self._seen: _Sightings = {}

    def look(self, known: Known, now: datetime.datetime) -> podinfo_pb2.PodConditions:
        """All that is to be told of the pod."""
        seen: _Sightings = {}
        for source, said in _all_said(known):
            key = (source, said.type)
            before, first = self._seen.get(key, (None, None))
            if before != said or first is None:
                is_heard = source != API or known.is_confirmed
                first = now if is_heard else None
            seen[key] = (said, first)
        self._seen = seen
        return _message(known, [(source, *seen[source, kind]) for source, kind in _believed(known)])


def _all_said(known: Known) -> Iterator[tuple[int, Said]]:
    for one in known.own:
        since = one.last_transition_time.isoformat()
        yield PODGATE, Said(one.type, one.status, one.reason, one.message, "", since)
    for source, pod in ((KUBELET, known.of_kubelet), (API, known.of_api)):
        for other in pod.status.conditions if pod else ():
            yield (
                source,
                Said(
                    other.type,
                    other.status,
                    other.reason,
                    other.message,
                    other.last_probe_time or "",
                    other.last_transition_time or "",
                ),
            )


def _believed(known: Known) -> list[tuple[int, str]]:
    """For each type, in order, whose word counts.

    podgate's for its own conditions, the kubelet's for those that it computes; of others both have
    copies, and the newer object's counts.
    """
    saying: dict[str, list[int]] = {}
    for source, said in _all_said(known):
        saying.setdefault(said.type, []).append(source)
    newer = KUBELET if known.newer is known.of_kubelet else API
    return [(_choose(kind, of, newer), kind) for kind, of in sorted(saying.items())]


def _choose(kind: str, sources: Iterable[int], newer: int) -> int:
    order: tuple[int, ...] = (newer, KUBELET, API, PODGATE)
    if kind in _BY_KUBELET:
        order = (KUBELET, API, PODGATE)
    elif kind.startswith(_OURS):
        order = (PODGATE, newer, KUBELET, API)
    return min(sources, key=order.index)


def _message(
    known: Known, believed: list[tuple[int, Said, datetime.datetime | None]]
) -> podinfo_pb2.PodConditions:
    uid, namespace, name = identity(known)
    made = podinfo_pb2.PodConditions(
        pod_uid=_text(uid),
        pod_namespace=_text(namespace),
        pod_name=_text(name),
        static=is_static(known),
        mirror_pod_uid=_text(mirror_uid(known)),
    )
    if (newer := known.newer) and newer.metadata.deletion_timestamp:
        _set_time(made.deletion_timestamp, newer.metadata.deletion_timestamp)
    for source, said, first in believed:
        one = made.conditions.add(
            type=_text(said.type),
            status=_STATUSES.get(said.status, podinfo_pb2.CONDITION_STATUS_UNSPECIFIED),
            reason=_text(said.reason),
            message=_text(said.message),
            source=podinfo_pb2.ConditionSource.ValueType(source),
        )
        if said.probed:
            _set_time(one.last_probe_time, said.probed)
        if said.since:
            _set_time(one.last_transition_time, said.since)
        if first is not None:
            one.observe_time.FromDatetime(first)
    return made


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


def _text(text: str) -> str:
    """Manifests may hold halves of surrogate pairs, which UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _set_time(field: Timestamp, text: str) -> None:
    """Times are texts of somebody else's: what is none is left out."""
    with contextlib.suppress(ValueError):
        found = Timestamp()
        found.FromJsonString(text)
        field.CopyFrom(found)
