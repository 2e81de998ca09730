"""Service endpoints on a node without a cluster, and their problems on any node."""

import asyncio

from agent import labels, tasks
from agent.admin.report import SourceProblem
from agent.kube.objects import ApiPod, ApiPodStatus, ObjectMetadata, PodIp
from agent.kube.pod_reports import PodReports
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.services.api import assembly
from agent.services.api.node_zones import FixedZone
from agent.services.api.source import ServiceEndpoints
from agent.settings import ServiceSettings, Settings


def problems(found: ServiceEndpoints | None) -> list[SourceProblem]:
    """For the agent's report, but for those of the API server."""
    if found is None:
        return []
    by_part = {} if found.is_from_api else found.source.problems
    sentences = [f"services from {part}: {problem}" for part, problem in by_part.items()]
    if found.saved_at:
        at = found.saved_at.isoformat(timespec="seconds")
        sentences.append(
            f"services are those saved at {at}; {found.source.name} has not confirmed them since"
        )
    return [SourceProblem(part="services", text=text) for text in sentences]


class ManifestServices:
    """Service endpoints on a node without a cluster. Its pods are those of manifests; of the pods
    that podgate probes, the probes alone decide whether they are ready."""

    def __init__(self, settings: Settings, chosen: ServiceSettings, store: PodStore) -> None:
        self._store = store
        self.endpoints = assembly.endpoints(
            chosen,
            node=chosen.node,
            run_directory=settings.run_directory,
            api=None,
            zones=FixedZone(chosen.node, chosen.zone),
        )
        self._pods = store.desired.subscribe()
        for uid in store.pods:
            self._pods.mark(uid)
        self._conditions = store.conditions.changes.subscribe()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "service endpoints", self.endpoints.run)
            tasks.start(group, "pods of service endpoints", self._follow_pods)
            tasks.start(group, "conditions of service endpoints", self._follow_conditions)

    async def _follow_pods(self) -> None:
        while True:
            for uid in await self._pods.next():
                state = self._store.get(uid)
                if state is None:
                    self.endpoints.end_pod(uid)
                else:
                    self.endpoints.set_pod(uid, PodReports(of_api=_as_object(state.pod)))

    async def _follow_conditions(self) -> None:
        while True:
            for uid in await self._conditions.next():
                condition = self._store.conditions.get(uid, labels.PROBES_PASSING)
                self.endpoints.condition_changed(uid, condition)


def _as_object(pod: Pod) -> ApiPod:
    addresses = () if pod.host_network else pod.reported_addresses
    return ApiPod(
        metadata=ObjectMetadata(namespace=pod.namespace, name=pod.name, uid=pod.uid),
        status=ApiPodStatus(pod_ips=tuple(PodIp(str(address)) for address in addresses)),
    )
