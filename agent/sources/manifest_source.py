"""The source of an agent without a cluster."""

import pathlib

from agent.admin.report import PodSourceStatus
from agent.pods.changes import Changes
from agent.pods.container_runs import PodContainers
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.sources.manifests import ManifestDirectory


class ManifestSource:
    """Pods of manifests. Their authors read status, log and metrics."""

    unready_reason: str | None = None

    def __init__(self, directory: pathlib.Path, store: PodStore, modes: PodModes) -> None:
        self.changes = Changes()
        self._manifests = ManifestDirectory(directory, store, modes)
        self._directory = directory

    @property
    def read_at(self) -> float:
        return self._manifests.read_at

    def start(self) -> None:
        self._manifests.refresh()

    async def run(self) -> None:
        await self._manifests.run()

    def hint(self) -> None:
        """Manifests are read when they change."""

    def containers_of(self, uid: str) -> PodContainers | None:
        return None

    def status(self) -> PodSourceStatus:
        return PodSourceStatus(pods_from=f"manifests in {self._directory}")
