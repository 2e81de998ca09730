"""The Internet sockets of a namespace, listed and ended: sock_diag(7).

Every answer is there when the request returns, so nothing here waits; a namespace with many sockets
costs about 3 us for each, so call it from a thread.
"""

import dataclasses
import errno
import os
import socket
import struct
from collections.abc import Container, Iterator

NETLINK_SOCK_DIAG = 4

# States of include/net/tcp_states.h, as bits. An unconnected UDP socket is in CLOSE.
ESTABLISHED = 1 << 1
FIN_WAIT1, FIN_WAIT2 = 1 << 4, 1 << 5
CLOSE = 1 << 7
CLOSE_WAIT = 1 << 8
LISTEN = 1 << 10

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_SOCK_DIAG_BY_FAMILY, _SOCK_DESTROY = 20, 21
_REQUEST_AND_ACK, _REQUEST_AND_DUMP = 0x5, 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_CGROUP_ID = 21  # INET_DIAG_CGROUP_ID, Linux 5.8 (6e3a401fc8af)

_HEADER = struct.Struct("=IHHII")
_CODE = struct.Struct("=i")
# struct inet_diag_req_v2 up to the socket's id, which is zero for "all".
_REQUEST = struct.Struct("=BBBBI")
_ID_BYTES = 48
# struct inet_diag_msg: family, state, 2 bytes, the id (ports, addresses, interface, cookie), three
# numbers, uid, inode.
_MESSAGE = struct.Struct(f"=BBxx{_ID_BYTES}s4xII4xI")
_PORTS = struct.Struct("!HH")
_ATTRIBUTE = struct.Struct("=HH")
_CGROUP = struct.Struct("=Q")
_RECEIVE_BYTES = 32 << 10
_MAPPED = bytes(10) + b"\xff\xff"


@dataclasses.dataclass(frozen=True, slots=True)
class Socket:
    """One socket. Addresses are 16 bytes, IPv4 mapped, as `bpf.abi.pack_address` makes them."""

    family: int
    protocol: int
    local: bytes
    local_port: int
    remote: bytes
    remote_port: int
    """0 of a UDP socket that is connected to nobody."""
    inode: int
    cgroup: int | None
    """Id of its creator's cgroup; None where the kernel does not say (before 5.8)."""
    id: bytes
    """struct inet_diag_sockid: names this socket and never a later one."""


class SockDiag:
    """A netlink socket to ask by; the namespace that it was made in is the one that answers."""

    def __init__(self, netlink: socket.socket | None = None) -> None:
        """netlink: of NETLINK_SOCK_DIAG; without one, the namespace of this thread is meant."""
        self._netlink = netlink or socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG
        )

    def __enter__(self) -> "SockDiag":
        return self

    def __exit__(self, *_: object) -> None:
        self._netlink.close()

    def sockets(
        self, protocol: int, states: int, remotes: Container[bytes] | None = None
    ) -> Iterator[Socket]:
        """All of a protocol (IP protocol number) in these states, of both families.

        remotes: only those connected to one of these addresses. Raises `OSError` (ENOENT: the
        kernel cannot list this protocol).
        """
        for family in _FAMILIES:
            body = _REQUEST.pack(family, protocol, 0, 0, states) + bytes(_ID_BYTES)
            self._send(_SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, body)
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

    def end(self, ended: Socket) -> bool:
        """End a socket: its owner reads ECONNABORTED, a TCP peer gets RST. Whether it was there.

        Linux 4.5 (64be0aed59ad). Raises `OSError` (EOPNOTSUPP: a kernel built without
        CONFIG_INET_DIAG_DESTROY).
        """
        body = _REQUEST.pack(ended.family, ended.protocol, 0, 0, 0) + ended.id
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
    """Whether a message ends the list. Raises `OSError`."""
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
) -> Socket | None:
    family, _, own_id, _, _, inode = _MESSAGE.unpack_from(data, start)
    remote = _address(family, own_id[20:36])
    if remotes is not None and remote not in remotes:
        return None
    cgroup = None
    at = start + _MESSAGE.size
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if kind == _CGROUP_ID:
            (cgroup,) = _CGROUP.unpack_from(data, at + _ATTRIBUTE.size)
        at += max(_ATTRIBUTE.size, (length + 3) & ~3)
    local_port, remote_port = _PORTS.unpack_from(own_id)
    local = _address(family, own_id[4:20])
    return Socket(family, protocol, local, local_port, remote, remote_port, inode, cgroup, own_id)


def _address(family: int, field: bytes) -> bytes:
    return _MAPPED + field[:4] if family == socket.AF_INET else field
