"""This node's pods in a cluster: the API server has their specs, the container runtime their netns.

Either may be away for any time: what was last read stays in force.
"""

import asyncio

from agent import tasks
from agent.admin.report import PodSourceStatus
from agent.cri.client import Runtime
from agent.cri.endpoints import open_runtime
from agent.cri.models import CriContainer, CriContainerState, Sandbox
from agent.cri.sandbox_netns import NetnsLocator
from agent.cri.sandboxes import Sandboxes
from agent.kube.api_pods import ApiPods
from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod, ContainerStatus
from agent.kubelet.pods_api import KubeletPods
from agent.pods.changes import Changes
from agent.pods.container_runs import ContainerRun, PodContainers
from agent.pods.events import PodEvent, PodEvents
from agent.pods.pod import Pod, Problem
from agent.pods.store import PodStore
from agent.policy.api_source import ApiPolicies
from agent.settings import Settings
from agent.sources.pod_sandboxes import PodSandboxJoin

_RESTARTS_NEVER = "Never"
# A sandbox that comes while the first list is made is in the second.
_COMPLETE_RELISTS = 2


class ClusterSource:
    """A `PodSource`: API server, kubelet and container runtime, joined."""

    def __init__(
        self,
        api: ApiClient,
        settings: Settings,
        store: PodStore,
        events: PodEvents,
        policies: ApiPolicies,
    ) -> None:
        """policies: their watch runs here, with the others."""
        assert settings.node_name is not None
        self.container_changes = Changes()
        self.object_changes = Changes()
        """Pods of which the API's object or the runtime's sandbox changed."""
        self.has_sandboxes = False
        """Whether the runtime has listed its sandboxes, so that a missing one means something."""
        self._settings = settings
        self._events = events
        self._policies = policies.watcher
        self._joined = PodSandboxJoin(store, default_mode=settings.mode)
        self.pods = ApiPods(
            api,
            node_name=settings.node_name,
            default_mode=settings.mode,
            on_pod=self._set_pod,
            on_removed=self._remove_pod,
            on_object=self._set_api_pod,
            on_warning=self._warn,
            state=settings.run_directory / "state" / "pods.json",
        )
        self._locator = NetnsLocator()
        self.sandboxes = Sandboxes(
            self._open_runtime,
            self._locator.locate,
            on_sandbox=self._set_sandbox,
            on_removed=self._remove_sandbox,
            on_containers=self._set_containers,
            on_relist=self._on_relist,
        )
        self.kubelet_pods = KubeletPods(self.pods)

    def start(self) -> None:
        """Add the pods that a previous agent saved. Reads a file."""
        self.pods.restore()

    async def run(self) -> None:
        """Follow API server, kubelet and runtime until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks.start(group, "pods of the API", self.pods.run)
                tasks.start(group, "pods of the kubelet", self.kubelet_pods.run)
                tasks.start(group, "watch of policies", self._policies.run)
                tasks.start(group, "sandboxes", self.sandboxes.run)
        finally:
            self._locator.close()

    @property
    def unready_reason(self) -> str | None:
        """Why not every pod of the node is in the store yet, in one sentence; else None."""
        if not self.pods.is_synced:
            return self.pods.pods.problem or "API server has not listed the pods yet"
        if self.sandboxes.relists < _COMPLETE_RELISTS or not self.sandboxes.is_settled:
            return self.sandboxes.problem or "initial sandbox list not finished"
        return None

    def hint(self) -> None:
        """An interface was added or removed, so sandboxes may have changed."""
        self.sandboxes.hint()

    @property
    def watch_problems(self) -> dict[str, str]:
        """Why a resource of the API server cannot be watched now, by its name."""
        watchers = (self.pods.pods, self.pods.namespaces, self.pods.nodes, self._policies)
        return {watcher.query.name: watcher.problem for watcher in watchers if watcher.problem}

    def status(self) -> PodSourceStatus:
        kubelet = " and kubelet" if self.kubelet_pods.is_connected else ""
        problem = self.sandboxes.problem
        return PodSourceStatus(
            pods_from=f"API server{kubelet}, node {self._settings.node_name}; "
            f"{len(self.sandboxes.current)} sandboxes",
            problems=[f"Container runtime: {problem}"] if problem else [],
        )

    def containers_of(self, uid: str) -> PodContainers:
        """By the container runtime, with what only the kubelet has from the API's status."""
        api_pod = self.pods.get(uid)
        statuses = {status.name: status for status in _statuses(api_pod)} if api_pod else {}
        return PodContainers(
            containers={
                container.name: _run(container, statuses.get(container.name))
                for container in self.sandboxes.containers.get(uid, ())
            },
            is_restartable=api_pod is None or api_pod.spec.restart_policy != _RESTARTS_NEVER,
            is_deleting=api_pod is not None and api_pod.metadata.deletion_timestamp is not None,
        )

    async def _open_runtime(self) -> Runtime:
        return await open_runtime(self._settings.cri_socket)

    def _set_pod(self, pod: Pod) -> None:
        api_pod = self.pods.get(pod.uid)
        if api_pod is not None and has_ended(api_pod):
            self._remove_pod(pod.uid)
        else:
            self._joined.set_pod(pod)

    def _set_api_pod(self, actual: ApiPod) -> None:
        if has_ended(actual):
            self._remove_pod(actual.uid)
            return
        self.object_changes.mark(actual.uid)
        self.container_changes.mark(actual.uid)

    def _remove_pod(self, uid: str) -> None:
        self._joined.remove_pod(uid)
        self.object_changes.mark(uid)

    def _set_sandbox(self, sandbox: Sandbox) -> None:
        self._joined.set_sandbox(sandbox)
        self.object_changes.mark(sandbox.pod_uid)

    def _remove_sandbox(self, sandbox: Sandbox) -> None:
        self._joined.remove_sandbox(sandbox)
        self.object_changes.mark(sandbox.pod_uid)

    def _set_containers(self, sandbox: Sandbox, containers: tuple[CriContainer, ...]) -> None:
        self.container_changes.mark(sandbox.pod_uid)

    def _on_relist(self) -> None:
        if self.sandboxes.relists < _COMPLETE_RELISTS:
            self.sandboxes.hint()
        if not self.has_sandboxes and self.sandboxes.is_settled:
            self.has_sandboxes = True
            for uid in self.pods.uids:
                self.object_changes.mark(uid)

    def _warn(self, pod: Pod, problem: Problem) -> None:
        self._events.record(PodEvent(pod.uid, problem.reason, problem.message, action="Reading"))


def has_ended(pod: ApiPod) -> bool:
    """Whether its containers are done: a Job's pod stays in the API for long after that."""
    return pod.status.phase in ("Succeeded", "Failed")


def _statuses(pod: ApiPod) -> tuple[ContainerStatus, ...]:
    return (*pod.status.init_container_statuses, *pod.status.container_statuses)


def _run(container: CriContainer, status: ContainerStatus | None) -> ContainerRun:
    is_same = status is not None and status.container_id.rpartition("/")[2] == container.id
    return ContainerRun(
        id=container.id,
        started_at=container.started.timestamp() if container.started else 0.0,
        is_running=container.state is CriContainerState.RUNNING,
        started_by_kubelet=status.started if status and is_same else None,
    )
