"""The process at the other end of a unix socket, and what the kernel has of it while it lives.

A process id alone may be another process' by the time it is looked up. A pidfd is of one process:
if that has not ended after /proc was read, what was read is its own. SO_PEERPIDFD (Linux 6.5) has
the one that connected; older kernels have its id alone, and a pidfd of that is opened here, so a
process that ends before its connection is accepted may be mistaken for a later one.
"""

import contextlib
import os
import select
import socket
import struct

from agent.linux.procfs import Procfs

# asm-generic/socket.h; Python has no name for it.
_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("iII")
_DESCRIPTOR = struct.Struct("i")


class PeerProcess:
    """One process. `close` it."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self._pid = pid
        self._pidfd = pidfd

    @classmethod
    def of(cls, accepted: socket.socket) -> "PeerProcess | None":
        """The process that opened a connection; None if it has ended, or is not visible in this pid
        namespace."""
        with contextlib.suppress(OSError):
            found = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid = int(_CREDENTIALS.unpack(found)[0])
            if pid > 0:
                return cls(pid, _pidfd(accepted, pid))
        return None

    def cgroup(self) -> str | None:
        """Its cgroup of version 2, such as "/system.slice/gpu.service"; None if the process has
        ended. Blocks."""
        found = Procfs().cgroup(self._pid)
        has_ended = self._pidfd < 0 or bool(select.select([self._pidfd], [], [], 0)[0])
        return None if has_ended else found

    def close(self) -> None:
        """Release the descriptor. It may be called more than once."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _pidfd(accepted: socket.socket, pid: int) -> int:
    """Raises `OSError`."""
    with contextlib.suppress(OSError):
        found = accepted.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _DESCRIPTOR.size)
        return int(_DESCRIPTOR.unpack(found)[0])
    return os.pidfd_open(pid)
