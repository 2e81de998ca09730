"""Namespaces of a trial that is a fork: what it does to processes and the network stays inside."""

import ctypes
import fcntl
import os
import socket
import struct

_CLONE_NEWNS, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1  # linux/sockios.h, linux/if.h
# More than tests write, and less than a machine has.
_MAX_BYTES = 1 << 30
_IFREQ = struct.Struct("16sh22x")

_libc = ctypes.CDLL(None, use_errno=True)


def fork() -> int:
    """As `os.fork`, but the child is the first process of a PID namespace: it sees no process
    outside, and all that it starts end with it. Raises `OSError`."""
    own, pid = os.open("/proc/self/ns/pid", os.O_RDONLY), -1
    try:
        _check(_libc.unshare(_CLONE_NEWPID))
        pid = os.fork()
        return pid
    finally:
        # What this process forks next is to have another one, or none.
        if pid:
            _check(_libc.setns(own, _CLONE_NEWPID))
        os.close(own)


def enter(directory: str) -> None:
    """In the child: a process group, mounts and a network of its own, and this directory empty, as
    a file system that ends with the child. Raises `OSError`."""
    # kill(0) reaches processes of the group in all namespaces.
    os.setsid()
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET))
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _check(_libc.mount(b"proc", b"/proc", b"proc", flags, None))
    options = f"size={_MAX_BYTES},mode=0755".encode()
    _check(_libc.mount(b"tmpfs", directory.encode(), b"tmpfs", 0, options))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", _IFF_UP))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
