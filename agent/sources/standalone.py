"""The pods of a kubelet without an API server: static pods, from its pods API (KEP-4188).

Alpha and disabled in Kubernetes 1.36 (feature gate PodsAPI), beta and enabled in 1.37. What it last
reported is saved: the next agent has it, also while the kubelet is away.
"""

import asyncio
import pathlib

import structlog

from agent import tasks
from agent.admin.report import PodSourceStatus, SourceProblem
from agent.kube import saved_pods
from agent.kube.node_pods import NodePods
from agent.kube.pod_reports import KUBELET
from agent.kube.saved_pods import SavedPods
from agent.logs import Event
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.settings import Settings
from agent.sources.node_source import NodeSource
from agent.state_files import StateSaver

log = structlog.get_logger(__name__)

_NO_NODE = ""
"""A standalone kubelet's pods belong to no node of a cluster."""
_SETTLE_SECONDS = 2.0


class StandalonePods(NodePods):
    """The kubelet's pods, saved."""

    def __init__(self, modes: PodModes, state: pathlib.Path) -> None:
        super().__init__(modes)
        self._state = state
        self.saver = StateSaver(
            state, self._content, failure=Event.PODS_NOT_SAVED, settle_seconds=_SETTLE_SECONDS
        )

    def restore(self) -> None:
        """Add what the previous agent saved. Reads a file; call it once, before all else."""
        saved = saved_pods.read(self._state, _NO_NODE).kubelet
        for pod in saved:
            self._by_origin[KUBELET][pod.uid] = pod
        self._is_listed = bool(saved)
        self.refresh_all()
        if saved:
            log.info(Event.SAVED_PODS_RESTORED, pods=len(saved))

    def _mark(self) -> None:
        self.saver.mark()

    def _content(self) -> SavedPods:
        return SavedPods(node_name=_NO_NODE, kubelet=list(self._by_origin[KUBELET].values()))


class StandaloneSource(NodeSource):
    """A `PodSource`: kubelet and container runtime, joined."""

    pods: StandalonePods

    def __init__(self, settings: Settings, store: PodStore, modes: PodModes) -> None:
        pods = StandalonePods(modes, settings.run_directory / "state" / "pods.json")
        super().__init__(pods, settings, store, modes)

    def start(self) -> None:
        """Add the pods that a previous agent saved. Reads a file."""
        self.pods.restore()
        self._update()

    async def run(self) -> None:
        """Follow kubelet and runtime until cancelled."""
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "saved pods", self.pods.saver.run)
            self.start_tasks(group)

    @property
    def unready_reason(self) -> str | None:
        """Why not every pod of the node is in the store yet, in one sentence; else None."""
        if not self.kubelet_pods.answered.is_set():
            return "kubelet has not listed its pods yet"
        if not (self.kubelet_pods.is_listed or self.pods.is_synced):
            return self._problem
        return self.runtime_unready_reason

    def status(self) -> PodSourceStatus:
        is_away = bool(self.kubelet_pods.problem)
        problems = [SourceProblem(part="kubelet", text=self._problem)] if is_away else []
        return PodSourceStatus(
            pods_from=f"kubelet without an API server; {len(self.sandboxes.current)} sandboxes",
            problems=[*problems, *self.runtime_problems()],
        )

    @property
    def _problem(self) -> str:
        return f"The kubelet's pods API does not respond: {self.kubelet_pods.problem}"
