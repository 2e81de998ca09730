"""All pods of the node, from all sources."""

from collections.abc import Callable, Iterable

from agent.api.podinfo.merge import PodRecord
from agent.kube.api_pods import ApiPods
from agent.kube.pod_reports import PodReports
from agent.pods.conditions import Condition
from agent.pods.pod import Pod


class PodRecords:
    """Joins the agent's pods and conditions with the objects of API server and kubelet."""

    def __init__(
        self,
        *,
        uids: Callable[[], Iterable[str]],
        pod_of: Callable[[str], Pod | None],
        conditions_of: Callable[[str], list[Condition]],
        source: ApiPods | None,
    ) -> None:
        """uids, pod_of: the agent's pods; source: in a cluster."""
        self._uids = uids
        self._pod_of = pod_of
        self._conditions_of = conditions_of
        self._source = source

    def uids(self) -> list[str]:
        """The runtime's uids of all pods."""
        source = self._source
        return list(dict.fromkeys((*self._uids(), *(source.uids if source else ()))))

    def of(self, uid: str) -> PodRecord | None:
        """The pod with this uid; None if there is none."""
        pod = self._pod_of(uid)
        if pod and not pod.namespace:
            # A manifest without a namespace never became a pod.
            pod = None
        reports = self._source.reports(uid) if self._source else PodReports()
        if pod is None and reports.newest is None:
            return None
        return PodRecord(pod, reports, tuple(self._conditions_of(uid)))
