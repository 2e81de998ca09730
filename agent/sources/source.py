"""Where the agent's pods come from, and where what happens to them is told."""

import pathlib
from typing import Protocol

from agent.admin.report import FeedStatus
from agent.pods.container_runs import PodContainers
from agent.pods.pod import Pod
from agent.sources.manifests import ManifestSource
from probes.engine.targets import ProbeKey
from probes.results import ProbeOutcome


class PodFeed(Protocol):
    """A cluster, or a directory of manifests. It tells of pods by callbacks of its own."""

    @property
    def unready_because(self) -> str | None:
        """Why not every pod of the node has been told yet, in one sentence; else None."""

    def start(self) -> None:
        """Tell of what can be known at once. Raises `OSError`."""

    async def run(self) -> None:
        """Tell of what changes, until cancelled."""

    def hint(self) -> None:
        """An interface came or went, so pods may have."""

    def run_of(self, uid: str) -> PodContainers | None:
        """What is known of a pod's containers; None where nobody knows."""

    def changed(self, uid: str) -> None:
        """A condition of a pod has changed."""

    def probed(self, pod: Pod, key: ProbeKey, outcome: ProbeOutcome) -> None:
        """A probe has ended."""

    def gated(self, pod: Pod) -> None:
        """A pod's interface has its first gate, and nobody had gated it before."""

    def gate_lost(self, pod: Pod, problem: str) -> None:
        """A gate that stood does not, and is being put back."""

    def unconfirmed_address(self, pod: Pod, problem: str) -> None:
        """A pod claims addresses that are not its own."""

    def status(self) -> FeedStatus:
        """For `podgate status`."""


class ManifestFeed:
    """Pods of manifests: whoever writes those reads status, log and metrics."""

    unready_because: str | None = None

    def __init__(self, source: ManifestSource, directory: pathlib.Path) -> None:
        self._source = source
        self._directory = directory

    def start(self) -> None:
        self._source.look()

    async def run(self) -> None:
        await self._source.run()

    def hint(self) -> None:
        """Manifests are looked at when they change."""

    def run_of(self, uid: str) -> PodContainers | None:
        return None

    def changed(self, uid: str) -> None:
        """Conditions are logged and served already."""

    def probed(self, pod: Pod, key: ProbeKey, outcome: ProbeOutcome) -> None:
        """The same."""

    def gated(self, pod: Pod) -> None:
        """The same."""

    def gate_lost(self, pod: Pod, problem: str) -> None:
        """The same."""

    def unconfirmed_address(self, pod: Pod, problem: str) -> None:
        """The same."""

    def status(self) -> FeedStatus:
        return FeedStatus(pods_from=f"manifests in {self._directory}")
