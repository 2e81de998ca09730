"""Internet sockets of a network namespace: listed and destroyed by sock_diag(7).

The kernel puts its response into the socket while it handles the request, so nothing here waits. A
socket costs about 3 us: list namespaces with many sockets from a thread.
"""

import dataclasses
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Container, Iterable, Iterator

from probes.netns import Netns

_NETLINK_SOCK_DIAG = 4

# States of include/net/tcp_states.h, as bits. An unconnected UDP socket is in CLOSE.
ESTABLISHED = 1 << 1
CLOSE = 1 << 7
CLOSE_WAIT = 1 << 8
LISTEN = 1 << 10
ANY_STATE = (1 << 32) - 1

FAMILIES = (socket.AF_INET, socket.AF_INET6)
_SOCK_DIAG_BY_FAMILY, _SOCK_DESTROY = 20, 21
_REQUEST_ONLY, _REQUEST_AND_ACK, _REQUEST_AND_DUMP = 0x1, 0x5, 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_SKV6ONLY = 11  # INET_DIAG_SKV6ONLY
_CGROUP_ID = 21  # INET_DIAG_CGROUP_ID, Linux 5.8 (6e3a401fc8af)
_SOCKOPT = 22  # INET_DIAG_SOCKOPT: struct inet_diag_sockopt
_TRANSPARENT = 1 << 5  # in its first byte

_HEADER = struct.Struct("=IHHII")
_CODE = struct.Struct("=i")
# struct inet_diag_req_v2 up to the socket's id, which is zero for "all" or begins with a port.
_REQUEST = struct.Struct("=BBBBI")
_ID_BYTES = 48
# struct inet_diag_msg: family, state, 2 bytes, the id (ports, addresses, interface, cookie), a
# number, two queues, uid, inode.
_MESSAGE = struct.Struct(f"=BBxx{_ID_BYTES}s4xIIII")
_PORTS = struct.Struct("!HH")
_ATTRIBUTE = struct.Struct("=HH")
_CGROUP = struct.Struct("=Q")
_COOKIE = struct.Struct("=II")
_COOKIE_OFFSET = 40  # in the id
_RECEIVE_BYTES = 32 << 10
_MAPPED = bytes(10) + b"\xff\xff"
_NO_COOKIE = b"\xff" * 8  # INET_DIAG_NOCOOKIE, twice

Endpoint = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]
"""Address and port."""


@dataclasses.dataclass(frozen=True, slots=True)
class InetSocket:
    """One socket. Addresses are 16 bytes; IPv4 addresses are mapped (RFC 4291, 2.5.5.2)."""

    family: int
    protocol: int
    local: bytes
    local_port: int
    remote: bytes
    remote_port: int
    """0 for an unconnected UDP socket."""
    inode: int
    cgroup: int | None
    """Id of its creator's cgroup; None if the kernel does not report it (before 5.8)."""
    id: bytes
    """struct inet_diag_sockid: identifies this socket, and never a later one."""
    is_v6_only: bool = False
    user: int = 0
    """User id of its creator; 0 also once its process has closed it."""
    is_transparent: bool = False
    """Whether it, or the listener that it comes from, has IP_TRANSPARENT, as TPROXY requires; False
    also if the kernel does not report it."""
    is_full: bool = False
    """Of a listener: whether its queue has no place for another connection."""

    @property
    def cookie(self) -> int:
        """SO_COOKIE: a number that no other socket of the machine has had."""
        low, high = _COOKIE.unpack_from(self.id, _COOKIE_OFFSET)
        return int(high << 32 | low)


class SockDiag:
    """Requests by one netlink socket, about the namespace in which that was created."""

    def __init__(self, netlink: socket.socket | None = None) -> None:
        """netlink: of sock_diag, owned by this object; default: one in this thread's namespace."""
        self._netlink = netlink or socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
        )

    @classmethod
    def open_in(cls, netns: Netns) -> "SockDiag":
        """Requests about another namespace. Raises `NetnsGoneError` and `OSError`."""
        return cls(netns.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG))

    @classmethod
    def for_users(cls) -> "SockDiag":
        """For `user` only, which then never blocks an event loop."""
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        return cls(socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG))

    def __enter__(self) -> "SockDiag":
        return self

    def __exit__(self, *_: object) -> None:
        self._netlink.close()

    def sockets(
        self,
        protocol: int,
        states: int,
        remotes: Container[bytes] | None = None,
        *,
        families: Iterable[int] = FAMILIES,
        port: int = 0,
        remote_port: int = 0,
    ) -> Iterator[InetSocket]:
        """All sockets of a protocol (IP protocol number) in these states.

        remotes: only those connected to one of these addresses; port: only those of this local
        port; remote_port: only those connected to this one. States other than LISTEN take a walk
        through the connections of all namespaces: at least 0.5 ms. Raises `OSError` (ENOENT: the
        kernel cannot list this protocol or family).
        """
        for family in families:
            body = _REQUEST.pack(family, protocol, 0, 0, states) + _PORTS.pack(port, remote_port)
            self._send(_SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, body + bytes(_ID_BYTES - 4))
            is_more = True
            while is_more:
                data = self._netlink.recv(_RECEIVE_BYTES)
                at = 0
                while is_more and at + _HEADER.size <= len(data):
                    length, kind, *_ = _HEADER.unpack_from(data, at)
                    is_more = not _is_end(kind, data, at)
                    if is_more:
                        found = _read(data, at + _HEADER.size, at + length, protocol, remotes)
                        if found:
                            yield found
                    at += (length + 3) & ~3

    def user(self, protocol: int, local: Endpoint, remote: Endpoint) -> int | None:
        """The user id of the process that has this connection open; None if there is none, or if
        the socket was closed already.

        Other states count as none: a socket that a process has closed is reported as root's, and
        for an unknown connection the kernel reports a listener on the local port. Raises `OSError`.
        """
        data = self._find(protocol, local, remote)
        if data is None:
            return None
        _, state, _, _, _, user, inode = _MESSAGE.unpack_from(data, _HEADER.size)
        return int(user) if 1 << state == ESTABLISHED and inode else None

    def connection(self, protocol: int, local: Endpoint, remote: Endpoint) -> InetSocket | None:
        """The socket with these ends, in any state but LISTEN; None if there is none. Takes 12 us.

        Raises `OSError`.
        """
        data = self._find(protocol, local, remote)
        found = data and _read(data, _HEADER.size, len(data), protocol, None)
        # For an unknown connection the kernel reports a listener on the local port.
        return found if found and found.remote_port else None

    def _find(self, protocol: int, local: Endpoint, remote: Endpoint) -> bytes | None:
        address, port = local
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        ends = [address.packed.ljust(16, b"\0"), remote[0].packed.ljust(16, b"\0")]
        own_id = _PORTS.pack(port, remote[1]) + b"".join(ends) + bytes(4) + _NO_COOKIE
        body = _REQUEST.pack(family, protocol, 0, 0, ANY_STATE) + own_id
        self._send(_SOCK_DIAG_BY_FAMILY, _REQUEST_ONLY, body)
        data = self._netlink.recv(_RECEIVE_BYTES)
        _, kind, *_ = _HEADER.unpack_from(data)
        if kind == _NLMSG_ERROR:
            (code,) = _CODE.unpack_from(data, _HEADER.size)
            if -code == errno.ENOENT:
                return None
            raise _error(code)
        return data

    def destroy(self, destroyed: InetSocket) -> bool:
        """Close a socket: its owner reads ECONNABORTED, a TCP peer receives RST. False if it did
        not exist.

        Linux 4.5 (64be0aed59ad). Raises `OSError` (EOPNOTSUPP: a kernel built without
        CONFIG_INET_DIAG_DESTROY).
        """
        body = _REQUEST.pack(destroyed.family, destroyed.protocol, 0, 0, 0) + destroyed.id
        self._send(_SOCK_DESTROY, _REQUEST_AND_ACK, body)
        data = self._netlink.recv(_RECEIVE_BYTES)
        (code,) = _CODE.unpack_from(data, _HEADER.size)
        if code and -code not in (errno.ENOENT, errno.ESTALE):
            raise _error(code)
        return not code

    def _send(self, kind: int, flags: int, body: bytes) -> None:
        header = _HEADER.pack(_HEADER.size + len(body), kind, flags, 0, 0)
        self._netlink.sendto(header + body, (0, 0))


def _is_end(kind: int, data: bytes, at: int) -> bool:
    """Whether this message is the last. Raises `OSError`."""
    if kind not in (_NLMSG_DONE, _NLMSG_ERROR):
        return False
    (code,) = _CODE.unpack_from(data, at + _HEADER.size)
    if code:
        raise _error(code)
    return True


def _error(code: int) -> OSError:
    return OSError(-code, f"sock_diag: {os.strerror(-code)}")


def _read(
    data: bytes, start: int, end: int, protocol: int, remotes: Container[bytes] | None
) -> InetSocket | None:
    family, state, own_id, queued, queue_limit, user, inode = _MESSAGE.unpack_from(data, start)
    remote = _address(family, own_id[20:36])
    if remotes is not None and remote not in remotes:
        return None
    cgroup = None
    is_v6_only = is_transparent = False
    at = start + _MESSAGE.size
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if kind == _CGROUP_ID:
            (cgroup,) = _CGROUP.unpack_from(data, at + _ATTRIBUTE.size)
        elif kind == _SKV6ONLY:
            is_v6_only = bool(data[at + _ATTRIBUTE.size])
        elif kind == _SOCKOPT:
            is_transparent = bool(data[at + _ATTRIBUTE.size] & _TRANSPARENT)
        at += max(_ATTRIBUTE.size, (length + 3) & ~3)
    local_port, remote_port = _PORTS.unpack_from(own_id)
    local = _address(family, own_id[4:20])
    return InetSocket(
        family,
        protocol,
        local,
        local_port,
        remote,
        remote_port,
        inode,
        cgroup,
        own_id,
        is_v6_only,
        user,
        is_transparent,
        is_full=1 << state == LISTEN and queued > queue_limit,
    )


def _address(family: int, field: bytes) -> bytes:
    return _MAPPED + field[:4] if family == socket.AF_INET else field
