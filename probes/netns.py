"""Sockets created in another network namespace.

A socket belongs to the namespace of the thread that created it. So podgate enters the pod's
namespace for the length of one socket() call and uses the socket from its one event loop
afterwards: no thread, no fork, no second loop. Inside, the thread must run nothing else: signals
are blocked, and a thread that cannot return ends the process, since it would do everything else as
the pod.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

from probes.errors import ProbeError

T = TypeVar("T")

BareSocket = socket.SocketType
"""The class below Python's socket.socket: it has no accept(), no makefile() and no context."""

_RESET_ON_CLOSE = struct.pack("=ii", 1, 0)  # struct linger


def connect_inside(sock: BareSocket, address: tuple[str, int]) -> int:
    """The result of a connect by the namespace's loopback: 0, EALREADY while it is pending, or the
    error. ECONNREFUSED also for a connection to itself (`ends_self_connection`).

    The whole handshake takes place during the first call, though that returns EINPROGRESS: calling
    again at once saves the wait for an event, and later shows the result.
    """
    result = sock.connect_ex(address)
    if result == errno.EINPROGRESS:
        result = sock.connect_ex(address)
    if result in (0, errno.EISCONN):
        # Only a socket with the dialled port can be its own peer.
        is_possible = sock.getsockname()[1] == address[1]
        return errno.ECONNREFUSED if is_possible and ends_self_connection(sock) else 0
    return result


def ends_self_connection(sock: BareSocket) -> bool:
    """Whether a connected TCP socket is its own peer; then the connection is reset.

    A connect to a port of the own namespace at which nothing listens succeeds if the kernel chooses
    that port as the socket's own (simultaneous open, RFC 9293 3.5). Nothing has answered, and the
    socket would keep the port from the server.
    """
    if sock.getsockname() != sock.getpeername():
        return False
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    return True


CLONE_NEWNET = 0x40000000  # linux/sched.h
NS_GET_NSTYPE = 0xB703  # linux/nsfs.h: which kind of namespace is this descriptor?
_SO_NETNS_COOKIE = 71  # asm-generic/socket.h
OWN_NETNS = "/proc/thread-self/ns/net"  # /proc/self would be the main thread's

# A path that is not a namespace may be a FIFO or a terminal: never wait, never adopt it.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_SOCKET_FLAGS = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ELOOP})
SHORTAGES = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
"""Of the machine (EAGAIN of connect(2): of routes): they show nothing of the other end."""

# Errors of this process or of the machine, which show nothing of the path.
_UNREADABLE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})
_SIG_BLOCK, _SIG_SETMASK = 0, 2
_SIGSET_BYTES = 128  # sizeof(sigset_t) in glibc and musl
_EXIT_STRANDED = 70  # EX_SOFTWARE of sysexits.h

# PyDLL keeps the GIL: each call takes less than giving it away and back.
# os.setns exists only since Python 3.12, and signal.pthread_sigmask builds
# a set of enums on each call, ten times the price of the call itself.
_libc = ctypes.PyDLL(None, use_errno=True)
_setns = _libc.setns
_setns.argtypes = (ctypes.c_int, ctypes.c_int)
# setfsuid(2) changes the calling thread alone, as libc calls it.
_setfsuid = _libc.setfsuid
_setfsuid.argtypes = (ctypes.c_uint32,)
_sigmask = _libc.pthread_sigmask
_sigmask.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_every_signal = ctypes.create_string_buffer(_SIGSET_BYTES)
_libc.sigfillset(_every_signal)


class NetnsError(ProbeError):
    """The path cannot be used as a pod's network namespace; the message names the remedy."""


class NetnsGoneError(NetnsError):
    """The namespace no longer exists, or the path leads to another one."""


class NetnsUnreadableError(NetnsError):
    """This process has no descriptor or memory left, so what is at the path is unknown."""


class _OwnNetns:
    """A thread's own namespace, to return to, and a buffer for its signal mask."""

    def __init__(self) -> None:
        self.descriptor = os.open(OWN_NETNS, os.O_RDONLY | os.O_CLOEXEC)
        self.signals = ctypes.create_string_buffer(_SIGSET_BYTES)

    def __del__(self) -> None:
        # Absent when the open itself failed.
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class _PerThread(threading.local):
    """One for each thread: opening /proc/thread-self/ns/net costs more than all other steps
    together.
    """

    own: _OwnNetns | None = None


_per_thread = _PerThread()


def close_own_netns() -> None:
    """Close this thread's own namespace.

    For a thread that has moved to another namespace by itself after it created sockets here:
    without this call its next socket would take it back to the previous one.
    """
    _per_thread.own = None


@dataclass(frozen=True, slots=True)
class Netns:
    """One network namespace: its path and identity.

    No descriptor is held between calls: it would keep a dead namespace, with all its devices and
    sockets, alive.
    """

    path: str
    """A path of nsfs: `/run/netns/NAME`, `/proc/PID/ns/net`, a CRI's bind mount."""
    device: int
    inode: int

    @classmethod
    def open(cls, path: str) -> "Netns":
        """Read the identity of the namespace at `path`.

        Raises NetnsGoneError if the path does not exist, NetnsUnreadableError without a descriptor
        or memory, NetnsError if it is no network namespace or is the caller's own: podgate must
        never probe the host as if it were a pod.
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
            if isinstance(error, OSError) and error.errno in _UNREADABLE:
                raise NetnsUnreadableError(
                    f"{path} cannot be opened now ({_strerror(error)})."
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
                f"{path} is the host's network namespace: give the pod's; hostNetwork pods are"
                " part of the node and cannot be used."
            )
        return cls(path, status.st_dev, status.st_ino)

    def exists(self) -> bool:
        """Whether the path still leads to the same namespace; True while that is unknown."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            return error.errno in _UNREADABLE
        return (status.st_dev, status.st_ino) == (self.device, self.inode)

    def socket(self, family: int, type: int, proto: int = 0) -> socket.socket:
        """Create a non-blocking, close-on-exec socket inside the namespace.

        Raises NetnsGoneError if the namespace no longer exists, and OSError if the kernel has no
        descriptor or memory left, or the process lacks CAP_SYS_ADMIN: an error of the caller, not
        of the pod.
        """
        return self.run_inside(lambda: socket.socket(family, type | _SOCKET_FLAGS, proto))

    def bare_socket(self, family: int, type: int, user: int = 0) -> BareSocket:
        """As `socket`, without what Python's class adds: a tenth of a probe's CPU time.

        user: id of the user whose socket it is to be for the pod's rules, such as iptables' `-m
        owner`; without CAP_SETUID it stays root's.
        """
        make = partial(BareSocket, family, type | _SOCKET_FLAGS)
        return self.run_inside(partial(_as_user, user, make) if user else make)

    def bare_sockets(self, families: Sequence[int], type: int) -> list[BareSocket]:
        """As `bare_socket`, one of each family, with one change of the namespace: that takes longer
        than all sockets. Either all are made or none."""

        def make() -> list[BareSocket]:
            made: list[BareSocket] = []
            try:
                made.extend(BareSocket(family, type | _SOCKET_FLAGS) for family in families)
            except OSError:
                for sock in made:
                    sock.close()
                raise
            return made

        return self.run_inside(make)

    def read_proc_net(self, name: str) -> str:
        """Read a file of /proc/net as processes inside see it; may take milliseconds.

        Raises NetnsGoneError, or OSError (ENOENT: the kernel has no such file).
        """
        # The open decides the namespace.
        path = f"/proc/thread-self/net/{name}"
        descriptor = self.run_inside(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        with open(descriptor, encoding="ascii", errors="replace") as file:
            return file.read()

    def set_sysctl(self, name: str, value: str) -> None:
        """Write a setting of the namespace; `name` is the path below /proc/sys/net.

        Raises NetnsGoneError, or OSError (ENOENT: the kernel has no such setting).
        """

        def write() -> None:
            # Each of these calls decides the namespace.
            descriptor = os.open(f"/proc/sys/net/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, value.encode("ascii"))
            finally:
                os.close(descriptor)

        self.run_inside(write)

    def run_inside(self, act: Callable[[], T]) -> T:
        """Call a short function inside, in this thread. Raises NetnsGoneError, and OSError."""
        own = _per_thread.own
        if own is None:
            own = _per_thread.own = _OwnNetns()
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
            return _inside(descriptor, own, act)
        finally:
            os.close(descriptor)

    def cookie(self) -> int | None:
        """The kernel's number for this namespace, unique until the next boot.

        None if the namespace no longer exists, and on kernels before 5.14 (e8b9eab99232 "net:
        retrieve netns cookie via getsocketopt").
        """
        with (
            contextlib.suppress(NetnsGoneError, OSError),
            self.socket(socket.AF_INET, socket.SOCK_STREAM) as sock,
        ):
            return _cookie_of(sock)
        return None


def netns_cookie() -> int | None:
    """As `Netns.cookie`, of the calling thread's network namespace."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return _cookie_of(sock)
    return None


def _cookie_of(sock: socket.socket) -> int:
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8), sys.byteorder)


_EXAMPLE = "/run/netns/NAME or /proc/PID/ns/net"


def _gone(path: str) -> str:
    return f"the network namespace {path} is gone: its pod has ended or was created again."


def _strerror(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _is_netns(descriptor: int) -> bool:
    try:
        return fcntl.ioctl(descriptor, NS_GET_NSTYPE) == CLONE_NEWNET
    except OSError:
        return False


def _inside(target: int, own: _OwnNetns, act: Callable[[], T]) -> T:
    """Enter `target`, call `act`, and return.

    Blocked signals cannot interrupt this thread. A signal that another thread receives can still
    make CPython run a handler here, and the handler may raise. It does so only after a call has
    returned, so the return is the first call in a `finally`, and the entry is inside its `try`.
    """
    _sigmask(_SIG_BLOCK, _every_signal, own.signals)
    try:
        try:
            if _setns(target, CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}")
            return act()
        finally:
            if _setns(own.descriptor, CLONE_NEWNET) != 0:
                _die()
    finally:
        _sigmask(_SIG_SETMASK, own.signals, None)


def _as_user(user: int, make: Callable[[], T]) -> T:
    """Call `make` with another file system user id: a socket belongs to that user (sock_init_data
    of net/core/sock.c takes the inode's)."""
    own = os.geteuid()
    try:
        _setfsuid(user)
        return make()
    finally:
        _setfsuid(own)


def _die() -> NoReturn:
    """End the process: this thread cannot leave a pod's namespace."""
    reason = os.strerror(ctypes.get_errno())
    os.write(
        2, f"podgate: cannot return from a pod's network namespace ({reason}): ending.\n".encode()
    )
    os._exit(_EXIT_STRANDED)
