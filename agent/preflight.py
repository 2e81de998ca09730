"""What podgate needs of the machine, found out by trying, each lack one sentence."""

import os
import pathlib

from bpf import errors, syscalls


class Unfit(Exception):
    """Something that podgate cannot do without is missing; the message says what to do."""


def check() -> None:
    """Raises `Unfit` when podgate cannot run here at all."""
    if os.geteuid() != 0:
        raise Unfit("podgate needs root (CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN); run it with sudo.")
    try:
        syscalls.next_id(syscalls.Command.PROG_GET_NEXT_ID, 0)
    except errors.BpfError as error:
        raise Unfit(
            f"this kernel or container does not allow bpf(2) ({error.strerror}); podgate needs a "
            "kernel of 5.10 or newer with CONFIG_BPF_SYSCALL, and CAP_BPF or CAP_SYS_ADMIN."
        ) from error
    if cgroup2_mount() is None:
        raise Unfit(
            "no cgroup v2 hierarchy is mounted, and podgate tells the node's processes apart by "
            "it; mount one with 'mount -t cgroup2 none /sys/fs/cgroup/unified'."
        )


def cgroup2_mount(mounts: pathlib.Path = pathlib.Path("/proc/mounts")) -> pathlib.Path | None:
    """Where cgroup v2 is mounted: on hybrid hosts it is not /sys/fs/cgroup itself."""
    for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, path, kind, *_ = line.split()
        if kind == "cgroup2":
            return pathlib.Path(path.encode().decode("unicode_escape"))
    return None
