"""Locks of files, which the agent, podgate-cni and commands take one after the other.

A process that is stopped (SIGSTOP) or frozen (a cgroup's freezer) keeps its locks, so waiting for
one has a limit.
"""

import errno
import fcntl
import os
import pathlib
import time

from bpf import errors

_PAUSE_SECONDS = 0.01


def take(descriptor: int, seconds: float) -> None:
    """Lock the file of this descriptor (flock(2)); the kernel releases it with the descriptor.

    Blocks. Raises `BpfError` (EBUSY) with the holder if that keeps it for `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise errors.BpfError(errno.EBUSY, _describe(descriptor, seconds)) from None
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _describe(descriptor: int, seconds: float) -> str:
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    return (
        f"{_holder(descriptor)} has kept {path} locked for more than {seconds:g} s; it may be "
        "stopped or frozen: let it continue, or end it"
    )


def _holder(descriptor: int) -> str:
    """As /proc/locks shows it (proc_locks(5)); 0 is a process of another pid namespace."""
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in pathlib.Path("/proc/locks").read_text(encoding="ascii").splitlines():
        # A process that waits has an arrow before its kind.
        match line.split():
            case [_, "FLOCK", _, _, pid, file, *_] if file == f"{device}:{status.st_ino}":
                return f"process {pid}" if pid != "0" else "a process of another pid namespace"
    return "another process"
