"""The pods of a node with a container runtime: an origin has their specs, the runtime their netns.

Either may be away for any time: what was last read stays in force.
"""

import asyncio
from collections.abc import Iterator

from prometheus_client import core

from agent import tasks
from agent.admin.report import SourceProblem
from agent.cni import added
from agent.cri import sandbox_netns
from agent.cri.client import Runtime
from agent.cri.endpoints import open_runtime
from agent.cri.models import CriContainer, CriContainerState, NetworkedSandbox
from agent.cri.sandboxes import Sandboxes
from agent.kube.node_pods import NodePods
from agent.kube.objects import ApiPod, ContainerStatus
from agent.kubelet.pods_api import KubeletPods
from agent.metrics import MetricFamily, single
from agent.nri.client import NriClient
from agent.pods.changes import Changes
from agent.pods.container_runs import ContainerRun, PodContainers
from agent.pods.pod_modes import NODE, PodModes
from agent.pods.store import PodStore
from agent.settings import Settings
from agent.sources.pod_sandboxes import PodSandboxJoin

SANDBOXES = MetricFamily(
    "podgate_sandboxes", "gauge", "Pods that have a sandbox in the container runtime."
)

_RESTARTS_NEVER = "Never"
_DONE = ("Succeeded", "Failed")


class NodeSource:
    """What a cluster's node and a standalone one have in common: kubelet and container runtime."""

    def __init__(
        self, pods: NodePods, settings: Settings, store: PodStore, modes: PodModes
    ) -> None:
        """pods: fed by the kubelet's pods API here."""
        self.changes = Changes()
        """Pods of which the object, the sandbox or a container changed."""
        self.pods = pods
        self._settings = settings
        self._store = store
        self._joined = PodSandboxJoin(store, modes)
        self.sandboxes = Sandboxes(
            self._open_runtime, sandbox_netns.locate, is_awaited=self._awaits_sandbox
        )
        self.kubelet_pods = KubeletPods(pods, keeps_whole=settings.feature_gates.pod_info_api)
        self.nri: NriClient | None = None
        """None: off."""
        if settings.nri_socket:
            self.nri = NriClient(settings.nri_socket, gate=self.gate_new, are_gated=store.synced)
        self._changed = pods.changes.subscribe()
        self.sandboxes.changes.subscribe(self._changed)
        self._changed_modes = modes.changes.subscribe()

    def start_tasks(self, group: asyncio.TaskGroup) -> None:
        """Follow kubelet and runtime, in tasks of this group."""
        tasks.start(group, "pods of the kubelet", self.kubelet_pods.run)
        tasks.start(group, "sandboxes", self.sandboxes.run)
        tasks.start(group, "pods and sandboxes", self._follow)
        tasks.start(group, "modes of sandboxes", self._follow_modes)
        tasks.start(group, "sandboxes of podgate-cni", self._follow_added)
        if self.nri:
            tasks.start(group, "nri", self.nri.run)

    @property
    def read_at(self) -> float:
        """Of the runtime: a pod that its origin has no more or not yet has its sandbox."""
        return self.sandboxes.listed_at

    def hint(self) -> None:
        """An interface was added or removed, so sandboxes may have changed."""
        self.sandboxes.hint()

    @property
    def runtime_unready_reason(self) -> str | None:
        """Why the runtime's part is not in the store yet, in one sentence; else None."""
        if not self.sandboxes.is_complete:
            return self.sandboxes.problem or "initial sandbox list not finished"
        return None if self._changed.is_empty else "pods that changed are being read"

    def collect(self) -> Iterator[core.Metric]:
        yield single(SANDBOXES, len(self.sandboxes.current))

    def runtime_problems(self) -> list[SourceProblem]:
        """Of the runtime, for `podgate status`."""
        if problem := self.sandboxes.problem:
            return [SourceProblem(part="runtime", text=f"Container runtime: {problem}")]
        if self.nri and self.nri.problem:
            return [SourceProblem(part="nri", text=self.nri.problem)]
        return []

    def containers_of(self, uid: str) -> PodContainers:
        """By the container runtime, with what only the kubelet has from the API's status."""
        reports = self.pods.reports(uid)
        api_pod, with_status = reports.newest, reports.newest_status
        statuses = {status.name: status for status in _statuses(with_status)}
        return PodContainers(
            containers={
                container.name: _run(container, statuses.get(container.name))
                for container in self.sandboxes.containers.get(uid, ())
            },
            is_restartable=api_pod is None or api_pod.spec.restart_policy != _RESTARTS_NEVER,
            is_deleting=reports.deletion_timestamp is not None,
        )

    def has_ended(self, uid: str) -> bool:
        """Whether the pod is deleted, or its containers are done: a Job's pod stays in the API for
        long after that."""
        reports = self.pods.reports(uid)
        found = reports.of_kubelet, reports.of_api
        return not any(found) or any(pod and pod.status.phase in _DONE for pod in found)

    def _awaits_sandbox(self) -> bool:
        """Whether a pod should get a sandbox soon."""
        return any(
            uid not in self.sandboxes.current
            and not (pod.host_network or pod.is_deleting or self.has_ended(uid))
            for uid, pod in self.pods.current.items()
        )

    async def _open_runtime(self) -> Runtime:
        return await open_runtime(self._settings.cri_socket)

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._update()

    async def _follow_added(self) -> None:
        """Sandboxes that podgate-cni reports: their conditions are patched while the runtime still
        creates them, so that the kubelet has these before the containers are ready."""
        async for found in added.received(self._settings.run_directory):
            await self.sandboxes.add(found)

    async def gate_new(self, new: NetworkedSandbox) -> bool:
        """Wait until a sandbox that the runtime is about to start has what it will have before its
        first container; whether that is its gate, or on purpose none (mode off)."""
        sandbox = new.sandbox
        in_force = self._store.in_force.subscribe()
        self._store.awaited.add(sandbox.pod_uid)
        try:
            await self.sandboxes.add(new, is_started=True)
            self._update()
            while (is_done := self._is_done(sandbox.pod_uid, sandbox.id)) is None:
                await in_force.next()
        finally:
            self._store.awaited.discard(sandbox.pod_uid)
            self._store.in_force.unsubscribe(in_force)
        return is_done

    def _is_done(self, uid: str, sandbox_id: str) -> bool | None:
        """Whether the pod's gate is in force in this sandbox; None: not yet."""
        sandbox, state = self.sandboxes.current.get(uid), self._store.get(uid)
        if sandbox is None or state is None or sandbox.id != sandbox_id:
            return False
        if state.gated_netns is not None and state.gated_netns == sandbox.netns:
            return True
        # A kernel error may pass; what a pass has found to be missing stays so.
        has_failed = state.status is not None and state.status.reason != "GateFailed"
        return False if has_failed else None

    async def _follow_modes(self) -> None:
        """`ApiPods` follows the labels that it reads; here are sandboxes without a pod of the API,
        and what else decides: ceilings, the default rules, ClusterNetworkPolicies."""
        while True:
            namespaces = set(await self._changed_modes.next())
            if NODE in namespaces:
                self.pods.refresh_all()
            else:
                for name in namespaces:
                    self.pods.refresh_namespace(name)
            for uid, sandbox in self.sandboxes.current.items():
                if NODE in namespaces or sandbox.pod_namespace in namespaces:
                    self._changed.mark(uid)

    def _update(self) -> None:
        for uid in self._changed.take():
            pod = None if self.has_ended(uid) else self.pods.current.get(uid)
            self._joined.update(uid, pod, self.sandboxes.current.get(uid))
            self.changes.mark(uid)


def _statuses(pod: ApiPod | None) -> tuple[ContainerStatus, ...]:
    if pod is None:
        return ()
    return (*pod.status.init_container_statuses, *pod.status.container_statuses)


def _run(container: CriContainer, status: ContainerStatus | None) -> ContainerRun:
    is_same = status is not None and status.container_id.rpartition("/")[2] == container.id
    return ContainerRun(
        id=container.id,
        started_at=container.started.timestamp() if container.started else 0.0,
        is_running=container.state is CriContainerState.RUNNING,
        started_by_kubelet=status.started if status and is_same else None,
    )
