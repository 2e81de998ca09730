"""Messages that the kernel sends to a netlink group: what changed in this network namespace."""

import errno
import socket
import struct
from collections.abc import Iterable

SOL_NETLINK = 270
_NETLINK_ADD_MEMBERSHIP = 1
NETLINK_LISTEN_ALL_NSID = 8
_NSID = struct.Struct("=i")
_MESSAGE_BYTES = 32 << 10


def joined(
    protocol: int, groups: Iterable[int], *, receive_buffer_bytes: int = 1 << 20
) -> socket.socket:
    """A socket that receives the messages of these groups. Raises `OSError`."""
    kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    opened = socket.socket(socket.AF_NETLINK, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        opened.bind((0, 0))
        for group in groups:
            opened.setsockopt(SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, group)
    except BaseException:
        opened.close()
        raise
    return opened


def join_all_namespaces(sock: socket.socket) -> None:
    """Receive the messages of each namespace that has a number in this one, too (Linux 4.1).
    Raises `OSError`."""
    sock.setsockopt(SOL_NETLINK, NETLINK_LISTEN_ALL_NSID, 1)


def namespace_of_next(sock: socket.socket, message_bytes: int) -> int | None:
    """Receive one datagram: the number of the namespace that it is from; None for this one.

    Raises `BlockingIOError` if there is none, and `OSError` (ENOBUFS: some were lost).
    """
    _, ancillary, _, _ = sock.recvmsg(message_bytes, socket.CMSG_SPACE(_NSID.size))
    for level, kind, data in ancillary:
        if (level, kind) == (SOL_NETLINK, NETLINK_LISTEN_ALL_NSID):
            return int(_NSID.unpack(data)[0])
    return None


def received(sock: socket.socket) -> list[bytes] | None:
    """All datagrams that wait; None if some were lost. Raises `OSError`."""
    found: list[bytes] = []
    is_complete = True
    while True:
        try:
            found.append(sock.recv(_MESSAGE_BYTES))
        except BlockingIOError:
            return found if is_complete else None
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            is_complete = False
