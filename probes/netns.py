"""Sockets born in another network namespace.

A socket belongs for ever to the namespace of the thread that made it. So
podgate visits the pod's namespace for the length of one socket() call and uses
the socket from its one event loop ever after: no thread, no fork, no second
loop. While away, the thread must run nothing else: signals are blocked, and a
thread that cannot come home ends the process, since whatever it did next it
would do as the pod.
"""

import ctypes
import errno
import fcntl
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000  # linux/sched.h
NS_GET_NSTYPE = 0xB703  # linux/nsfs.h: which kind of namespace is this descriptor?
_SO_NETNS_COOKIE = 71  # asm-generic/socket.h
OWN_NETNS = "/proc/thread-self/ns/net"  # /proc/self would be the main thread's

# A path that is not a namespace may be a FIFO or a terminal: never wait, never adopt it.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_SOCKET_FLAGS = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ELOOP})
_SIG_BLOCK, _SIG_SETMASK = 0, 2
_SIGSET_BYTES = 128  # sizeof(sigset_t) in glibc and musl
_EXIT_STRANDED = 70  # EX_SOFTWARE of sysexits.h

# PyDLL keeps the GIL: each call takes less than giving it away and back.
# os.setns exists only since Python 3.12, and signal.pthread_sigmask builds
# a set of enums on each call, ten times the price of the call itself.
_libc = ctypes.PyDLL(None, use_errno=True)
_setns = _libc.setns
_setns.argtypes = (ctypes.c_int, ctypes.c_int)
_sigmask = _libc.pthread_sigmask
_sigmask.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_every_signal = ctypes.create_string_buffer(_SIGSET_BYTES)
_libc.sigfillset(_every_signal)


class NetnsError(Exception):
    """This path cannot be used as a pod's network namespace; the message says what to do."""


class NetnsGoneError(NetnsError):
    """The namespace that was opened here has ended, or another one took its place."""


class _OwnNetns:
    """One thread's way back: its own namespace, and room to save its signal mask."""

    def __init__(self) -> None:
        self.descriptor = os.open(OWN_NETNS, os.O_RDONLY | os.O_CLOEXEC)
        self.signals = ctypes.create_string_buffer(_SIGSET_BYTES)

    def __del__(self) -> None:
        # Absent when the open itself failed.
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class _PerThread(threading.local):
    """Kept per thread: opening /proc/thread-self/ns/net costs more than all the rest together."""

    home: _OwnNetns | None = None


_per_thread = _PerThread()


def close_own_netns() -> None:
    """Forget which namespace this thread comes from.

    For a thread that has moved to another namespace by itself after it made
    sockets here: without this call its next socket would take it back to
    where it was before.
    """
    _per_thread.home = None


@dataclass(frozen=True, slots=True)
class Netns:
    """One network namespace: where it is found, and which one is meant.

    No descriptor is held between calls: a held one keeps a dead namespace,
    with all its devices and sockets, alive.
    """

    path: str
    """A path of nsfs: `/run/netns/NAME`, `/proc/PID/ns/net`, a CRI's bind mount."""
    device: int
    inode: int

    @classmethod
    def open(cls, path: str) -> "Netns":
        """Look at `path` and remember which namespace is there.

        Raises NetnsGoneError if nothing is there, NetnsError if it is no network
        namespace or is the caller's own: podgate must never probe the node as
        if it were a pod.
        """
        try:
            # Namespaces are regular files to stat(); the open of anything else may do things.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise NetnsError(f"{path} is not a network namespace: give a path like {_EXAMPLE}.")
            descriptor = os.open(path, _OPEN_FLAGS)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _GONE:
                raise NetnsGoneError(
                    f"{path} does not exist: give the path of a running pod's namespace."
                ) from error
            raise NetnsError(
                f"{path!r} cannot be opened ({_strerror(error)}): check the path and run as root."
            ) from error
        try:
            if not _is_netns(descriptor):
                raise NetnsError(f"{path} is not a network namespace: give a path like {_EXAMPLE}.")
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        own = os.stat(OWN_NETNS)
        if (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino):
            raise NetnsError(
                f"{path} is the node's own network namespace: give the pod's; hostNetwork pods are"
                " part of the node and cannot be used."
            )
        return cls(path, status.st_dev, status.st_ino)

    def exists(self) -> bool:
        """Whether the same namespace is still found at the path."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)

    def socket(self, family: int, type: int, proto: int = 0) -> socket.socket:
        """Make a non-blocking, close-on-exec socket inside the namespace.

        Raises NetnsGoneError if the namespace is no longer there, and OSError if
        the kernel has no descriptor or memory left, or lacks the privilege
        (CAP_SYS_ADMIN): the caller's own trouble, not the pod's.
        """
        return self.run_inside(lambda: socket.socket(family, type | _SOCKET_FLAGS, proto))

    def read_proc_net(self, name: str) -> str:
        """A file of /proc/net as processes inside see it; it may take milliseconds.

        Raises NetnsGoneError, or OSError (ENOENT: the kernel has no such file).
        """
        # Which namespace it is about is settled when it is opened.
        path = f"/proc/thread-self/net/{name}"
        descriptor = self.run_inside(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        with open(descriptor, encoding="ascii", errors="replace") as file:
            return file.read()

    def set_sysctl(self, name: str, value: str) -> None:
        """Write a setting of the namespace itself: `name` as below /proc/sys/net.

        Raises NetnsGoneError, or OSError (ENOENT: the kernel has no such setting).
        """

        def write() -> None:
            # Which namespace it is about is settled at each of these calls.
            descriptor = os.open(f"/proc/sys/net/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, value.encode("ascii"))
            finally:
                os.close(descriptor)

        self.run_inside(write)

    def run_inside(self, act: Callable[[], T]) -> T:
        """Do one short thing inside, in this thread. Raises NetnsGoneError, and OSError."""
        home = _per_thread.home
        if home is None:
            home = _per_thread.home = _OwnNetns()
        try:
            descriptor = os.open(self.path, _OPEN_FLAGS)
        except OSError as error:
            if error.errno in _GONE:
                raise NetnsGoneError(_gone(self.path)) from error
            raise
        try:
            status = os.fstat(descriptor)
            if status.st_ino != self.inode or status.st_dev != self.device:
                raise NetnsGoneError(_gone(self.path))
            return _inside(descriptor, home, act)
        finally:
            os.close(descriptor)

    def cookie(self) -> int | None:
        """The kernel's number for this namespace, which no later one gets until the next boot.

        None where it is gone, and on kernels before 5.14 (e8b9eab99232 "net: retrieve netns cookie
        via getsocketopt").
        """
        try:
            with self.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
                value = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except (NetnsGoneError, OSError):
            return None
        return int.from_bytes(value, sys.byteorder)


_EXAMPLE = "/run/netns/NAME or /proc/PID/ns/net"


def _gone(path: str) -> str:
    return f"the network namespace {path} is gone: its pod has ended or was made anew."


def _strerror(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _is_netns(descriptor: int) -> bool:
    try:
        return fcntl.ioctl(descriptor, NS_GET_NSTYPE) == CLONE_NEWNET
    except OSError:
        return False


def _inside(target: int, home: _OwnNetns, act: Callable[[], T]) -> T:
    """Go to `target`, do one short thing, come home.

    Blocked signals cannot interrupt this thread. A signal that another thread
    takes can still make CPython run a handler here, and the handler raise; it
    does so only after a call has returned, so the way back stands in a
    `finally` whose first call it is, and the way out inside its `try`.
    """
    _sigmask(_SIG_BLOCK, _every_signal, home.signals)
    try:
        try:
            if _setns(target, CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}")
            return act()
        finally:
            if _setns(home.descriptor, CLONE_NEWNET) != 0:
                _die()
    finally:
        _sigmask(_SIG_SETMASK, home.signals, None)


def _die() -> NoReturn:
    """End the process: this thread is stuck in a pod's namespace."""
    reason = os.strerror(ctypes.get_errno())
    os.write(
        2, f"podgate: cannot return from a pod's network namespace ({reason}): ending.\n".encode()
    )
    os._exit(_EXIT_STRANDED)
