"""Sources of the agent's pods: a cluster, or a directory of manifests."""

import pathlib
from typing import Protocol

from agent.admin.report import PodSourceStatus
from agent.pods.changes import Changes
from agent.pods.container_runs import ContainerSource, PodContainers
from agent.sources.manifests import ManifestDirectory


class PodSource(ContainerSource, Protocol):
    """A source of pods, which it writes into the store."""

    @property
    def unready_reason(self) -> str | None:
        """Why not every pod of the node is in the store yet, in one sentence; else None."""

    def start(self) -> None:
        """Add the pods that can be read at once. Raises `OSError`."""

    async def run(self) -> None:
        """Follow changes until cancelled."""

    def hint(self) -> None:
        """An interface was added or removed, so pods may have changed."""

    def status(self) -> PodSourceStatus:
        """For `podgate status`."""


class ManifestSource:
    """Pods of manifests. Their authors read status, log and metrics."""

    unready_reason: str | None = None

    def __init__(self, manifests: ManifestDirectory, directory: pathlib.Path) -> None:
        self.changes = Changes()
        self._manifests = manifests
        self._directory = directory

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
