"""What is known of a pod's containers as they run; a container runtime is needed to know it."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from agent.pods.changes import Changes


class ContainerRun(msgspec.Struct, frozen=True):
    """One container's newest run. id: of the runtime; started_at: Unix time in seconds."""

    id: str
    started_at: float
    is_running: bool
    started_by_kubelet: bool | None = None
    """Its `status.containerStatuses[].started`; None where the API does not speak of this run."""


class PodContainers(msgspec.Struct, frozen=True):
    """A pod's containers by name; those that have not been created yet are missing."""

    containers: Mapping[str, ContainerRun] = {}
    is_restartable: bool = True
    """Whether containers that end are started again (restartPolicy)."""
    is_deleting: bool = False


class ContainerSource(Protocol):
    """Where the containers of pods are known."""

    changes: Changes
    """Pods of which `containers_of` may have changed."""

    def containers_of(self, uid: str) -> PodContainers | None:
        """A pod's containers; None where there is no container runtime to list them."""
