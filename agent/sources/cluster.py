"""This node's pods in a cluster: the API server says what they are, the container runtime where.

And the way back: conditions and Events to the API server. Either side may be away for as long as
it likes: what was known last stays in force, and what is to be told waits.
"""

import asyncio
import datetime
import pathlib
from collections.abc import Callable

import structlog

from agent import labels, tasks
from agent.admin.report import FeedStatus
from agent.api.services.source import ServiceEndpoints
from agent.cri.client import Runtime
from agent.cri.endpoints import open_runtime
from agent.cri.models import CriContainer, CriContainerState, Sandbox
from agent.cri.sandbox_netns import NetnsLocator
from agent.cri.sandboxes import Sandboxes
from agent.kube.api_pods import ApiPods
from agent.kube.client import ApiClient
from agent.kube.condition_writer import ConditionWriter
from agent.kube.events import EventRecorder, kubelet_reports
from agent.kube.objects import ApiPod, ContainerStatus
from agent.kubelet.pods_api import KubeletPods
from agent.metrics import Metrics
from agent.pods.conditions import Condition, Conditions
from agent.pods.container_runs import ContainerRun, PodContainers
from agent.pods.pod import Pod, Problem
from agent.policy.api_source import ApiPolicies
from agent.settings import Settings
from agent.sources.pod_sandboxes import PodSandboxJoin
from probes.engine.targets import ProbeKey
from probes.results import ProbeOutcome, ProbeResult

log = structlog.get_logger(__name__)

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_RESTARTS_NEVER = "Never"
# A sandbox that comes while the first list is made is in the second.
_COMPLETE_RELISTS = 2


class Cluster:
    """A `PodFeed`: tells of the cluster's pods, and tells the cluster about them."""

    def __init__(
        self,
        api: ApiClient,
        settings: Settings,
        metrics: Metrics,
        *,
        conditions: Conditions,
        policies: ApiPolicies,
        on_pod: Callable[[Pod], None],
        on_removed: Callable[[str], None],
        on_run: Callable[[str], None],
    ) -> None:
        """conditions: what is to be written, told by `changed`; policies: whose watch is run here;
        on_run: gets the uid of a pod of whose containers `run_of` has something new to say.
        """
        assert settings.node_name is not None
        self._settings = settings
        self._metrics = metrics
        self._on_run = on_run
        self._joined = PodSandboxJoin(
            unknown_mode=settings.mode, on_pod=on_pod, on_removed=on_removed
        )
        self.pods = ApiPods(
            api,
            node_name=settings.node_name,
            default_mode=settings.mode,
            on_pod=self._set_pod,
            on_removed=self._forget,
            on_object=self._see,
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
        self._knows_sandboxes = False
        self._conditions = conditions
        self._policies = policies.watcher
        self.writer = ConditionWriter(
            api,
            conditions_of=self._conditions_of,
            sandbox_of=self._sandbox_name,
            boot=_BOOT_ID.read_text(encoding="ascii").strip(),
            writes_all=settings.write_all_conditions,
        )
        self.kubelet_pods = KubeletPods(self.pods)
        self.events = EventRecorder(api, node_name=settings.node_name)
        self.endpoints: ServiceEndpoints | None = None
        if settings.service_endpoints:
            self.endpoints = ServiceEndpoints(
                api,
                node=settings.node_name,
                nodes=self.pods.nodes,
                run_directory=settings.run_directory,
                address=settings.localnet_address,
            )

    def start(self) -> None:
        """Tell of the pods that an earlier agent knew. Reads a file."""
        self.pods.restore()

    async def run(self) -> None:
        """Follow both until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks.start(group, "pods of the API", self.pods.run)
                tasks.start(group, "pods of the kubelet", self.kubelet_pods.run)
                tasks.start(group, "watch of policies", self._policies.run)
                tasks.start(group, "sandboxes", self.sandboxes.run)
                tasks.start(group, "conditions to the API", self.writer.run)
                tasks.start(group, "events to the API", self.events.run)
                if self.endpoints:
                    tasks.start(group, "service endpoints", self.endpoints.run)
        finally:
            self._locator.close()

    @property
    def unready_because(self) -> str | None:
        """Why not every pod of the node has been told yet, in one sentence; else None."""
        if not self.pods.is_synced:
            return self.pods.pods.problem or "the API server has not told of the pods yet"
        if self.sandboxes.relists < _COMPLETE_RELISTS or not self.sandboxes.is_settled:
            return self.sandboxes.problem or "not every sandbox has been looked at yet"
        return None

    def hint(self) -> None:
        """An interface came or went, so sandboxes may have."""
        self.sandboxes.hint()

    def changed(self, uid: str) -> None:
        """A condition of this pod has changed."""
        self.writer.enqueue(uid)
        if self.endpoints:
            self.endpoints.changed(uid, self._conditions.get(uid, labels.PROBES_PASSING))

    def probed(self, pod: Pod, key: ProbeKey, outcome: ProbeOutcome) -> None:
        """A probe of podgate's has ended: what is wrong is told in the kubelet's words, unless the
        kubelet runs the same one and tells (pkg/kubelet/events/event.go).
        """
        is_warning = outcome.result is ProbeResult.WARNING
        if outcome.passed and not is_warning:
            return
        if kubelet_reports(pod.spec, key.container, key.type.value.lower()):
            return
        reason, what = ("ProbeWarning", "warning") if is_warning else ("Unhealthy", "failed")
        note = f"{key.type.value} probe {what}: {outcome.message}"
        self._tell(pod.uid, reason, note, action="Probing", container=key.container)

    def gate_lost(self, pod: Pod, problem: str) -> None:
        """A gate that stood does not, and is being put back."""
        self._tell(pod.uid, "GateLost", problem, action="Gating")

    def unconfirmed_address(self, pod: Pod, problem: str) -> None:
        """A pod claims addresses that are not its own."""
        self._tell(pod.uid, "UnconfirmedAddress", problem, action="Gating")

    def gated(self, pod: Pod) -> None:
        sandbox = self.sandboxes.current.get(pod.uid)
        if sandbox is None or sandbox.created is None:
            return
        age = datetime.datetime.now(datetime.UTC) - sandbox.created
        seconds = max(0.0, age.total_seconds())
        self._metrics.ungated_seconds.observe(seconds)
        started = [
            one.name
            for one in self.sandboxes.containers.get(pod.uid, ())
            if one.state is not CriContainerState.CREATED
        ]
        say = log.warning if started else log.info
        say(
            "containers started before their pod's gate" if started else "pod's first gate",
            pod=pod.full_name,
            sandbox=sandbox.id,
            ungated_seconds=round(seconds, 3),
            containers=started,
        )

    @property
    def api_problems(self) -> dict[str, str]:
        """What of the API server is not heard or not told now, and why."""
        found = {
            watcher.query.name: watcher.problem
            for watcher in (
                *(self.pods.pods, self.pods.namespaces, self.pods.nodes),
                self._policies,
            )
        }
        found["conditions"] = self.writer.problem
        if self.endpoints:
            found |= self.endpoints.problems
        return {what: problem for what, problem in found.items() if problem}

    def status(self) -> FeedStatus:
        problems = [f"API server, {what}: {problem}" for what, problem in self.api_problems.items()]
        if self.sandboxes.problem:
            problems.append(f"Container runtime: {self.sandboxes.problem}")
        kubelet = " and the kubelet" if self.kubelet_pods.is_connected else ""
        return FeedStatus(
            pods_from=f"the API server{kubelet}, for node {self._settings.node_name}; "
            f"{len(self.sandboxes.current)} sandboxes of the container runtime",
            problems=problems,
            unsaid=self.writer.pending,
        )

    def run_of(self, uid: str) -> PodContainers:
        """What is known of the pod's containers: the runtime's word, and the API's where only the
        kubelet knows."""
        api_pod = self.pods.get(uid)
        status = {one.name: one for one in _statuses(api_pod)} if api_pod else {}
        return PodContainers(
            containers={
                container.name: _run(container, status.get(container.name))
                for container in self.sandboxes.containers.get(uid, ())
            },
            restarts=api_pod is None or api_pod.spec.restart_policy != _RESTARTS_NEVER,
            is_deleting=api_pod is not None and api_pod.metadata.deletion_timestamp is not None,
        )

    async def _open_runtime(self) -> Runtime:
        return await open_runtime(self._settings.cri_socket)

    def _set_pod(self, pod: Pod) -> None:
        api_pod = self.pods.get(pod.uid)
        if api_pod is not None and _has_ended(api_pod):
            self._forget(pod.uid)
        else:
            self._joined.set_pod(pod)

    def _see(self, actual: ApiPod) -> None:
        if _has_ended(actual):
            self._forget(actual.uid)
            return
        self.writer.set_pod(actual)
        if self.endpoints:
            self.endpoints.see_pod(actual)
        self._on_run(actual.uid)

    def _forget(self, uid: str) -> None:
        self.writer.forget(uid)
        if self.endpoints:
            self.endpoints.forget_pod(uid)
        self._joined.remove_pod(uid)

    def _set_sandbox(self, sandbox: Sandbox) -> None:
        self._joined.set_sandbox(sandbox)
        # The stamp of its conditions names another one now.
        self.writer.enqueue(sandbox.pod_uid)

    def _remove_sandbox(self, sandbox: Sandbox) -> None:
        self._joined.remove_sandbox(sandbox)
        self.writer.enqueue(sandbox.pod_uid)

    def _set_containers(self, sandbox: Sandbox, containers: tuple[CriContainer, ...]) -> None:
        self._on_run(sandbox.pod_uid)

    def _on_relist(self) -> None:
        if self.sandboxes.relists < _COMPLETE_RELISTS:
            self.sandboxes.hint()
        if not self._knows_sandboxes and self.sandboxes.is_settled:
            self._knows_sandboxes = True
            self.writer.enqueue_all()

    def _conditions_of(self, uid: str) -> list[Condition]:
        """What the API is to be told of a pod.

        Until the runtime has told of its sandboxes, that one is missing says nothing; of a pod that
        is being deleted it says nothing new.
        """
        api_pod = self.pods.get(uid)
        is_deleting = api_pod is not None and api_pod.metadata.deletion_timestamp is not None
        has_ended = is_deleting and uid not in self.sandboxes.current
        return self._conditions.of(uid) if self._knows_sandboxes and not has_ended else []

    def _sandbox_name(self, uid: str) -> str:
        sandbox = self.sandboxes.current.get(uid)
        return sandbox.id[:12] if sandbox else ""

    def _warn(self, pod: Pod, problem: Problem) -> None:
        self._tell(pod.uid, problem.reason, problem.message, action="Reading")

    def _tell(self, uid: str, reason: str, note: str, *, action: str, container: str = "") -> None:
        if api_pod := self.pods.get(uid):
            self.events.record(api_pod, reason, note, action=action, container=container)


def _has_ended(pod: ApiPod) -> bool:
    """A Job's pod stays in the API for long after its containers; nobody waits for it then."""
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
