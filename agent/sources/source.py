"""A source of the agent's pods: a cluster, or a directory of manifests. Only the one that an agent
has is imported."""

from typing import Protocol

from agent.admin.report import PodSourceStatus
from agent.pods.container_runs import ContainerSource


class PodSource(ContainerSource, Protocol):
    """A source of pods, which it writes into the store."""

    @property
    def unready_reason(self) -> str | None:
        """Why not every pod of the node is in the store yet, in one sentence; else None."""

    @property
    def read_at(self) -> float:
        """When the newest complete read of the node's pods started, by the event loop's clock."""

    def start(self) -> None:
        """Add the pods that can be read at once. Raises `OSError`."""

    async def run(self) -> None:
        """Follow changes until cancelled."""

    def hint(self) -> None:
        """An interface was added or removed, so pods may have changed."""

    def status(self) -> PodSourceStatus:
        """For `podgate status`."""
