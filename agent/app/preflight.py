"""Checks that the machine has what podgate needs; each problem is one sentence."""

import os
import pathlib

from agent.errors import PreflightError
from agent.linux.cgroups import cgroup2_mount
from bpf import errors, syscalls

# Bits of CapEff (linux/capability.h). SYS_ADMIN includes BPF and PERFMON, which kernels
# before 5.8 lack.
_CAPABILITIES = {
    "CAP_NET_BROADCAST": 11,  # netlink messages of all pods' namespaces
    "CAP_NET_ADMIN": 12,  # nftables, the relay's interfaces
    "CAP_NET_RAW": 13,  # packets of path tests and of the relay
    "CAP_SYS_PTRACE": 19,  # namespaces of other processes: the kubelet, above all
    "CAP_SYS_ADMIN": 21,  # bpf(2), pods' namespaces
}


def check() -> None:
    """Raises `PreflightError` if podgate cannot run on this machine."""
    check_rights()
    if cgroup2_mount() is None:
        raise PreflightError(
            "no cgroup v2 hierarchy is mounted, and podgate distinguishes host processes by "
            "it; mount one with 'mount -t cgroup2 none /sys/fs/cgroup/unified'."
        )


def check_rights() -> None:
    """All that a command needs which removes what podgate has attached. Raises `PreflightError`."""
    if os.geteuid() != 0:
        raise PreflightError(
            "podgate needs root (CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN); run it with sudo."
        )
    if missing := missing_capabilities():
        raise PreflightError(
            f"podgate runs without {', '.join(missing)}; give its container these capabilities, or "
            "make it privileged."
        )
    try:
        syscalls.next_id(syscalls.Command.PROG_GET_NEXT_ID, 0)
    except errors.BpfError as error:
        raise PreflightError(
            f"this kernel or container does not allow bpf(2) ({error.strerror}); podgate needs a "
            "kernel of 5.10 or newer with CONFIG_BPF_SYSCALL, and CAP_BPF or CAP_SYS_ADMIN."
        ) from error


def missing_capabilities(status: pathlib.Path = pathlib.Path("/proc/self/status")) -> list[str]:
    """Names of the capabilities that podgate needs and this process lacks."""
    for line in status.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            effective = int(value, 16)
            return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    return []
