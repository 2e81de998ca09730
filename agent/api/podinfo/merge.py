"""Merges what each source reports of a pod: no I/O, no clock."""

import dataclasses
from collections.abc import Iterator

from agent.kube import pod_reports
from agent.kube.objects import ApiPod
from agent.kube.pod_reports import PodReports
from agent.pods import conditions
from agent.pods.pod import Pod

# ConditionSource of podinfo.proto.
PODGATE, KUBELET, API, OWNER = 1, 2, 3, 4

_SOURCES = {pod_reports.KUBELET: KUBELET, pod_reports.API: API}


@dataclasses.dataclass(frozen=True, slots=True)
class PodRecord:
    """One pod from all sources."""

    pod: Pod | None = None
    reports: PodReports = dataclasses.field(default_factory=PodReports)
    own: tuple[conditions.Condition, ...] = ()
    addresses: tuple[str, ...] = ()
    """Confirmed ones, for a pod that only the agent knows."""

    @property
    def newer(self) -> ApiPod | None:
        """The object with the newer version; the API server's in doubt."""
        return self.reports.newest

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
        of_api, of_kubelet = self.reports.of_api, self.reports.of_kubelet
        if of_api is not None:
            return of_api.is_mirror
        return of_kubelet is not None and not of_kubelet.metadata.resource_version

    @property
    def mirror_uid(self) -> str:
        """The API's uid of a static pod, else empty."""
        of_api = self.reports.of_api
        return of_api.metadata.uid if of_api and of_api.is_mirror else ""

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
        source = PODGATE if own.type in conditions.TYPES else OWNER
        yield ReportedCondition(
            source, own.type, own.status, own.reason, own.message, "", changed_at
        )
    for source, pod in (
        (KUBELET, record.reports.of_kubelet),
        (API, record.reports.of_api),
    ):
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


def is_received(record: PodRecord, source: int) -> bool:
    """Whether this agent has received what the source reports; a previous agent saved the rest."""
    if source == API:
        return record.reports.is_confirmed
    return source != KUBELET or record.reports.is_current


def effective_conditions(record: PodRecord) -> list[ReportedCondition]:
    """One condition of each type, sorted by type.

    podgate's for its own conditions, and for those that it keeps for their owners; of others, where
    kubelet and API server have one each, the one that `PodReports` chooses.
    """
    found: dict[str, dict[int, ReportedCondition]] = {}
    for reported in reported_conditions(record):
        found.setdefault(reported.type, {})[reported.source] = reported
    return [
        by_source.get(PODGATE)
        or by_source.get(OWNER)
        or by_source[_SOURCES[record.reports.origin_of(kind)]]
        for kind, by_source in sorted(found.items())
    ]


def utf8_safe(text: str) -> str:
    """The text as UTF-8 can encode it: manifests may contain unpaired surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")
