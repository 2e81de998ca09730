"""The API server on this node, if there is one: by fact, not by name.

A static pod's is the kubelet's to start, and its label is as good as the manifest on the node's
disk. Any other is the host process that serves the address and port which the API server publishes
as its own (the EndpointSlice default/kubernetes). While it is down, any process can listen there,
so it must hold CAP_SYS_ADMIN: podgate cannot block such a process anyway.
"""

import socket
from collections.abc import Collection, Iterator

from agent.kubelet.search import is_containers
from agent.linux.procfs import Procfs
from agent.policy.selectors import LabelSelector, PodSelector

_CAP_SYS_ADMIN = 21  # linux/capability.h

STATIC_PODS = PodSelector(("kube-system",), LabelSelector({"component": "kube-apiserver"}))
"""Static pods of the API server: kubernetes/cmd/kubeadm/app/phases/controlplane/manifests.go
(labels component and tier), also of RKE2 and kops."""


class ApiServerProcess:
    """The host process that is this node's API server."""

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs
        self._pid: int | None = None
        """The one that was found last."""

    def find_cgroup(self, endpoints: Collection[tuple[str, int]]) -> str | None:
        """Its cgroup; None if there is none.

        endpoints: the addresses and ports of all API servers. Reads /proc, if one of the addresses
        is this node's: milliseconds, or less if the process is that of the last time.
        """
        procfs = self._procfs
        ports = {port for address, port in endpoints if _is_local(address)}
        listeners = {one for port in ports for one in procfs.own_listeners(port)}
        if not listeners:
            return None
        for pid in self._candidates():
            if self._serves(pid, listeners):
                self._pid = pid
                path = procfs.cgroup(pid)
                # All processes without a cgroup of their own are in the root.
                return path if path and path != "/" and path.isprintable() else None
        return None

    def _candidates(self) -> Iterator[int]:
        if self._pid is not None:
            yield self._pid
        yield from self._procfs.pids()

    def _serves(self, pid: int, listeners: Collection[str]) -> bool:
        """Whether this host process has one of these sockets, and the rights of an API server."""
        procfs = self._procfs
        return (
            procfs.has_capability(pid, _CAP_SYS_ADMIN)
            and procfs.namespace(pid, "net") == procfs.namespace("self", "net")
            and not any(map(is_containers, procfs.cgroups(pid).values()))
            and not procfs.sockets(pid).isdisjoint(listeners)
        )


def _is_local(address: str) -> bool:
    """Whether the address is this node's: the kernel binds sockets to no other."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
