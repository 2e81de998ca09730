"""This node's pods in a cluster: the API server has their specs, the container runtime their netns.

Either may be away for any time: what was last read stays in force.
"""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from agent import tasks
from agent.admin.report import PodSourceStatus, SourceProblem
from agent.kube.api_pods import ApiPods
from agent.kube.client import ApiClient
from agent.kube.watcher import Watcher
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.policy.api_source import ApiPolicies, WatchedPolicies
from agent.policy.egress_types import EgressPolicy
from agent.settings import ClusterNetworkPolicyMode, Settings
from agent.sources.node_source import NodeSource

if TYPE_CHECKING:
    from agent.policy.cluster_network_policies.source import ClusterNetworkPolicies


class ClusterSource(NodeSource):
    """A `PodSource`: API server, kubelet and container runtime, joined."""

    pods: ApiPods

    def __init__(
        self,
        api: ApiClient,
        settings: Settings,
        store: PodStore,
        policies: ApiPolicies,
        modes: PodModes,
        egress: WatchedPolicies[EgressPolicy] | None = None,
    ) -> None:
        """policies, egress: their watches run here, with the others; modes: gets the labels of
        node and namespaces."""
        assert settings.node_name is not None
        pods = ApiPods(
            api,
            node_name=settings.node_name,
            modes=modes,
            state=settings.run_directory / "state" / "pods.json",
            keeps_whole=settings.feature_gates.pod_info_api,
        )
        super().__init__(pods, settings, store, modes)
        self._policies = policies.watcher
        self._egress = egress.watcher if egress else None
        self.network_policies: ClusterNetworkPolicies | None = None
        """None: they are not read."""
        reading = settings.cluster_network_policies
        if reading is not ClusterNetworkPolicyMode.OFF:
            from agent.policy.cluster_network_policies import source

            self.network_policies = source.ClusterNetworkPolicies(
                api,
                state=settings.run_directory / "state" / "clusternetworkpolicies.json",
                labels=self.pods.labels,
                modes=modes,
                closes=reading is ClusterNetworkPolicyMode.CLOSE,
            )
            if self.network_policies.closes:
                modes.closures = self.network_policies
        self._watchers: tuple[Watcher[Any], ...] = (
            *(self.pods.pods, self.pods.namespaces, self.pods.nodes),
            policies.watcher,
            *(self.network_policies.watchers if self.network_policies else ()),
            *([self._egress] if self._egress else ()),
        )

    def start(self) -> None:
        """Add the pods that a previous agent saved. Reads files."""
        if self.network_policies:
            self.network_policies.restore()
        self.pods.restore()
        self._update()

    async def run(self) -> None:
        """Follow API server, kubelet and runtime until cancelled."""
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "pods of the API", self.pods.run)
            tasks.start(group, "watch of policies", self._policies.run)
            if self._egress:
                tasks.start(group, "watch of egress policies", self._egress.run)
            if self.network_policies:
                run = self.network_policies.run
                tasks.start(group, "cluster network policies", run)
            self.start_tasks(group)

    def node_uid(self) -> str:
        """Of this node's object in the API; empty while it is unknown."""
        nodes = list(self.pods.nodes.objects.values())
        return nodes[0].metadata.uid if nodes else ""

    @property
    def unready_reason(self) -> str | None:
        """Why not every pod of the node is in the store yet, in one sentence; else None."""
        if not self.pods.is_synced:
            return self.pods.pods.problem or "API server has not listed the pods yet"
        if not self.kubelet_pods.answered.is_set():
            return "kubelet has not listed its pods yet"
        return self.runtime_unready_reason

    def report_watchers(self, watchers: Iterable[Watcher[Any]]) -> None:
        """Have the source's reports include these, which run elsewhere."""
        self._watchers = (*self._watchers, *watchers)

    @property
    def watch_problems(self) -> dict[str, str]:
        """Why a resource of the API server cannot be watched now, by its name."""
        return {one.query.name: one.problem for one in self._watchers if one.problem}

    @property
    def watch_ages(self) -> dict[str, float]:
        """Seconds since the API server last sent something about a resource, by its name."""
        now = asyncio.get_running_loop().time()
        return {
            one.query.name: now - one.received_at
            for one in self._watchers
            if one.received_at is not None and not one.is_absent
        }

    @property
    def watched(self) -> list[str]:
        """Names of the resources of the API server that are watched."""
        return list(dict.fromkeys(one.query.name for one in self._watchers))

    def status(self) -> PodSourceStatus:
        kubelet = " and kubelet" if self.kubelet_pods.is_connected else ""
        problems = [
            SourceProblem(part="definition", text=f"API server: it has no {one.query.name}")
            for one in (self._policies, self._egress)
            if one and one.is_absent
        ]
        return PodSourceStatus(
            pods_from=f"API server{kubelet}, node {self._settings.node_name}; "
            f"{len(self.sandboxes.current)} sandboxes",
            problems=[*problems, *self.runtime_problems()],
        )
