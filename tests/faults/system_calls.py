"""System calls that the suite lets fail: their numbers, by class.

A class is what a component needs of the kernel. Calls without which nothing runs, such as futex(2),
are in none; nor is mmap(2): an allocator that gets no memory ends C libraries with the process, and
the kernel's own answer is the OOM killer.
"""

import errno
import os
from collections.abc import Mapping

# arch/x86/entry/syscalls/syscall_64.tbl, and include/uapi/asm-generic/unistd.h of arm64, which has
# only the calls with a directory's descriptor.
_NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        **{"read": 0, "write": 1, "open": 2, "pread64": 17, "pwrite64": 18, "readv": 19},
        **{"writev": 20, "socket": 41, "connect": 42, "accept": 43, "sendto": 44, "recvfrom": 45},
        **{"sendmsg": 46, "recvmsg": 47, "bind": 49, "socketpair": 53, "clone": 56, "fork": 57},
        **{"vfork": 58, "execve": 59, "fsync": 74, "rename": 82, "mkdir": 83, "rmdir": 84},
        **{"unlink": 87, "readlink": 89, "getdents64": 217, "inotify_add_watch": 254},
        **{"openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264},
        **{"readlinkat": 267, "accept4": 288, "eventfd2": 290, "epoll_create1": 291, "pipe2": 293},
        **{"inotify_init1": 294, "setns": 308, "renameat2": 316, "bpf": 321, "statx": 332},
        **{"pidfd_open": 434, "clone3": 435, "openat2": 437},
    },
    "aarch64": {
        **{"eventfd2": 19, "epoll_create1": 20, "inotify_init1": 26, "inotify_add_watch": 27},
        **{"mkdirat": 34, "unlinkat": 35, "renameat": 38, "openat": 56, "pipe2": 59},
        **{"getdents64": 61, "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67},
        **{"pwrite64": 68, "readlinkat": 78, "newfstatat": 79, "fsync": 82, "socket": 198},
        **{"socketpair": 199, "bind": 200, "accept": 202, "connect": 203, "sendto": 206},
        **{"recvfrom": 207, "sendmsg": 211, "recvmsg": 212, "clone": 220, "execve": 221},
        **{"accept4": 242, "setns": 268, "renameat2": 276, "bpf": 280, "statx": 291},
        **{"pidfd_open": 434, "clone3": 435, "openat2": 437},
    },
}
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h

_MACHINE = os.uname().machine
AUDIT_ARCHITECTURE = _AUDIT_ARCHITECTURES[_MACHINE]
NUMBERS = _NUMBERS[_MACHINE]
"""By name, of this machine."""
NAMES = {number: name for name, number in NUMBERS.items()}

CLASSES: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "open": (
        ("open", "openat", "openat2"),
        (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO),
    ),
    "read": (
        ("read", "pread64", "readv", "getdents64", "readlink", "readlinkat"),
        (errno.EIO, errno.ENOMEM),
    ),
    "stat": (("newfstatat", "statx"), (errno.EIO, errno.ENOMEM)),
    "write": (
        (
            *("write", "pwrite64", "writev", "fsync", "rename", "renameat", "renameat2"),
            *("mkdir", "mkdirat", "rmdir", "unlink", "unlinkat"),
        ),
        (errno.ENOSPC, errno.EIO),
    ),
    "socket": (
        ("socket", "socketpair", "bind"),
        (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS),
    ),
    "connect": (("connect",), (errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS)),
    "accept": (("accept", "accept4"), (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)),
    "message": (
        ("sendto", "recvfrom", "sendmsg", "recvmsg"),
        (errno.ENOMEM, errno.ENOBUFS, errno.EIO),
    ),
    "process": (
        ("clone", "clone3", "fork", "vfork", "execve"),
        (errno.EAGAIN, errno.ENOMEM),
    ),
    "handle": (
        ("eventfd2", "epoll_create1", "pipe2", "pidfd_open"),
        (errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    ),
    "inotify": (
        ("inotify_init1", "inotify_add_watch"),
        (errno.EMFILE, errno.ENOSPC, errno.ENOMEM),
    ),
    "namespace": (("setns",), (errno.ENOMEM,)),
    "bpf": (("bpf",), (errno.ENOMEM, errno.ENOSPC, errno.EAGAIN, errno.EIO)),
}
"""Names of calls, and the errors that they have when a machine has run out of something."""

INTERCEPTED = tuple(
    sorted(NUMBERS[name] for names, _ in CLASSES.values() for name in names if name in NUMBERS)
)
"""Numbers of all of them."""
