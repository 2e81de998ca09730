"""Ports to which a pod's gate admits the kubelet: those that the pod declares."""

import pathlib
import socket
import stat

from bpf import abi
from bpf.rules import Rule, SourceKind
from probes.spec.specs import PodSpec

# Of the drivers systemd and cgroupfs, and of kind, which nests them
# (kubernetes/pkg/kubelet/cm/cgroup_manager_linux.go).
_PODS_CGROUPS = (
    "kubepods.slice",
    "kubepods",
    "kubelet.slice/kubelet-kubepods.slice",
    "kubelet/kubepods",
)

NO_PODS_CGROUP = (
    f"The cgroup of pods is not found, as {', '.join(_PODS_CGROUPS)} below cgroup v2: the kubelet "
    "has another --cgroup-root, so processes of pods count as the host's."
)

_ANY_TCP_PORT = Rule(SourceKind.KUBELET, socket.IPPROTO_TCP)


def kubelet_rules(spec: PodSpec) -> tuple[Rule, ...]:
    """Rules that admit the kubelet to the declared ports, or to any port of a pod with an http(s)
    probe or hook, whose redirects to other ports it follows (pkg/probe/http).

    Also to any port of a pod whose probes are not all valid, or that declares more ports than a
    gate has room for: a healthy pod must not be restarted for that.
    """
    declared = spec.declared
    if declared.any_port or spec.errors or len(declared.ports) > abi.GATE_RULES:
        return (_ANY_TCP_PORT,)
    return tuple(
        Rule(SourceKind.KUBELET, socket.IPPROTO_TCP, port, port) for port in sorted(declared.ports)
    )


def pods_cgroup(cgroup2: pathlib.Path) -> tuple[int, int] | None:
    """Id of the common parent cgroup of all pods, and its depth below the root.

    None on a node without a kubelet's hierarchy.
    """
    for name in _PODS_CGROUPS:
        try:
            status = (cgroup2 / name).stat()
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            return status.st_ino, len(pathlib.PurePath(name).parts)
    return None
