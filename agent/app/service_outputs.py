"""Service endpoints, on a node of a cluster and on one without."""

import asyncio

from agent import labels, tasks
from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod, ApiPodStatus, MetadataOnly, ObjectMetadata, PodIp
from agent.kube.pod_reports import PodReports
from agent.kube.watcher import Watcher
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.services.api import assembly, node_zones
from agent.services.api.node_zones import FixedZone, WatchedZones
from agent.services.api.source import ServiceEndpoints
from agent.settings import ServiceSettings, Settings
from agent.sources.cluster import ClusterSource


def of_cluster(
    settings: Settings, chosen: ServiceSettings, api: ApiClient, source: ClusterSource
) -> tuple[ServiceEndpoints, Watcher[MetadataOnly] | None]:
    """Service endpoints on a node of a cluster, and the watch of all nodes if they need one."""
    assert settings.node_name is not None
    all_nodes = node_zones.watch_all(api) if chosen.listen else None
    endpoints = assembly.endpoints(
        chosen,
        node=settings.node_name,
        run_directory=settings.run_directory,
        api=api,
        zones=WatchedZones(all_nodes or source.pods.nodes),
        saved_pods=source.pods.saver,
    )
    return endpoints, all_nodes


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
