"""All pods of the node, from all sources."""

from collections.abc import Callable, Iterable

from agent.api.podinfo.merge import PodRecord
from agent.kube.node_pods import NodePods
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
        addresses_of: Callable[[str], tuple[str, ...]],
        source: NodePods | None,
    ) -> None:
        """uids, pod_of: the agent's pods; addresses_of: their confirmed addresses; source: in a
        cluster, where it has all of them."""
        self._uids = uids
        self._pod_of = pod_of
        self._conditions_of = conditions_of
        self._addresses_of = addresses_of
        self._source = source

    def uids(self) -> list[str]:
        """The runtime's uids of all pods."""
        return list(self._source.uids if self._source else self._uids())

    def of(self, uid: str) -> PodRecord | None:
        """The pod with this uid; None if there is none.

        In a cluster a pod that API server and kubelet have deleted is gone, although the agent has
        it until its sandbox is removed.
        """
        pod = self._pod_of(uid)
        if pod and not pod.namespace:
            # A manifest without a namespace never became a pod.
            pod = None
        reports = self._source.reports(uid) if self._source else PodReports()
        if reports.newest is None and (self._source or pod is None):
            return None
        addresses = () if self._source else self._addresses_of(uid)
        return PodRecord(pod, reports, tuple(self._conditions_of(uid)), addresses)
