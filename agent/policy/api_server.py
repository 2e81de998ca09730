"""The API server on this node, if there is one: by fact, not by name.

A static pod's is the kubelet's to start, and its label is as good as the manifest on the node's
disk. Any other is the host process that serves the address and port which the API server publishes
as its own (the EndpointSlice default/kubernetes). While it is down, any process can listen there,
so it must hold CAP_SYS_ADMIN: podgate cannot block such a process anyway.
"""

import socket
from collections.abc import Collection

from agent.kubelet.search import is_containers
from agent.linux.procfs import Procfs
from agent.policy.selectors import LabelSelector, PodSelector

_CAP_SYS_ADMIN = 21  # linux/capability.h

STATIC_PODS = PodSelector(("kube-system",), LabelSelector({"component": "kube-apiserver"}))
"""Static pods of the API server: kubernetes/cmd/kubeadm/app/phases/controlplane/manifests.go
(labels component and tier), also of RKE2 and kops."""


def cgroup_of_process(endpoints: Collection[tuple[str, int]], procfs: Procfs) -> str | None:
    """The cgroup of the host process that is this node's API server; None if there is none.

    endpoints: the addresses and ports of all API servers. Reads /proc, if one of the addresses is
    this node's: milliseconds.
    """
    ports = {port for address, port in endpoints if _is_local(address)}
    if not ports:
        return None
    own = procfs.namespace("self", "net")
    for pid in procfs.pids():
        if (
            procfs.has_capability(pid, _CAP_SYS_ADMIN)
            and procfs.namespace(pid, "net") == own
            and not any(map(is_containers, procfs.cgroups(pid).values()))
            and any(procfs.is_listening(pid, port) for port in ports)
        ):
            path = procfs.cgroup(pid)
            # All processes without a cgroup of their own are in the root.
            return None if path == "/" else path
    return None


def _is_local(address: str) -> bool:
    """Whether the address is this node's: the kernel binds sockets to no other."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
