"""Names of pods and cgroups: what the agent saved, and what the node has now."""

import pathlib
import socket
from collections.abc import Iterable

from agent.admin.observations import ObservedPod
from agent.drops import history, source_processes
from agent.drops.source_processes import CgroupName
from agent.linux.cgroups import cgroup_paths


class Names:
    """Without saved state pods have no names, and interfaces and addresses identify them."""

    def __init__(self, run_directory: pathlib.Path) -> None:
        state = run_directory / "state"
        self._pods = history.saved_pods(state / history.FLOWS_FILE)
        self._interfaces = dict(socket.if_nameindex())
        self._cgroups = {0: source_processes.NO_SOCKET}
        self._source_pods: dict[int, ObservedPod] = {}
        for name in source_processes.saved_names(state / source_processes.NAMES_FILE):
            self._cgroups[name.cgroup] = name.path
            if name.pod:
                self._source_pods[name.cgroup] = name.pod

    def pod(self, ifindex: int) -> ObservedPod:
        """Both names are empty if no agent has saved them."""
        return self._pods.get(ifindex) or ObservedPod(namespace="", name="")

    def interface(self, ifindex: int) -> str:
        """Empty if the node has no such interface."""
        return self._interfaces.get(ifindex, "")

    def learn(self, cgroups: Iterable[int]) -> None:
        """Find the paths of cgroups that have no name yet. Walks the hierarchy once."""
        unnamed = set(cgroups) - self._cgroups.keys()
        if unnamed:
            self._cgroups |= dict.fromkeys(unnamed, source_processes.GONE) | cgroup_paths(unnamed)

    def source(self, number: int) -> CgroupName:
        """The cgroup's path, and the pod that it belongs to, if an agent has saved that."""
        return CgroupName(number, self.cgroup(number), self._source_pods.get(number))

    def cgroup(self, number: int) -> str:
        """The path of a cgroup by its id."""
        self.learn([number])
        return self._cgroups[number]
