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
        pods: Callable[[], Iterable[Pod]],
        conditions_of: Callable[[str], list[Condition]],
        source: ApiPods | None,
    ) -> None:
        """pods: the agent's; source: in a cluster."""
        self._pods = pods
        self._conditions_of = conditions_of
        self._source = source

    def all(self) -> dict[str, PodRecord]:
        """By the runtime's uid."""
        # A manifest without a namespace never became a pod.
        pods = {pod.uid: pod for pod in self._pods() if pod.namespace}
        source = self._source
        uids = dict.fromkeys((*pods, *(source.uids if source else ())))
        return {
            uid: PodRecord(
                pod=pods.get(uid),
                reports=source.reports(uid) if source else PodReports(),
                own=tuple(self._conditions_of(uid)),
            )
            for uid in uids
        }
