"""Who listens in a pod, as its kernel says: sock_diag(7) on a socket born in its namespace."""

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable

import msgspec

from probes.netns import Netns

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_AND_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_LISTENING = 1 << 10  # TCP_LISTEN as a bit of idiag_states
_SKV6ONLY = 11  # INET_DIAG_SKV6ONLY

_HEADER = struct.Struct("=IHHII")
# struct inet_diag_req_v2 up to the port; the rest of the socket's id is zero.
_REQUEST = struct.Struct("=BBBBI")
_PORT = struct.Struct("!H")
_ID_BYTES = 48
_MESSAGE_BYTES = 72  # struct inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")
_RECEIVE_BYTES = 32 * 1024


class ListeningSocket(msgspec.Struct, frozen=True, order=True):
    """One listening TCP socket."""

    address: str
    """`0.0.0.0` or `::` for any."""
    port: int
    is_v6_only: bool = False

    def accepts(self, address: str) -> bool:
        """Whether connections to this address of the pod come to it."""
        if self.address == "0.0.0.0":
            return ":" not in address
        if self.address == "::":
            return ":" in address or not self.is_v6_only
        mapped = f"::ffff:{address}"
        return ipaddress.ip_address(self.address) in (
            ipaddress.ip_address(address),
            ipaddress.ip_address(mapped if ":" not in address else address),
        )


def listeners(netns: Netns, port: int = 0) -> list[ListeningSocket]:
    """The listeners of a namespace, of one port if given; some 50 us, and it does not wait.

    Raises NetnsGone, and OSError where the kernel has no inet_diag or no memory.
    """
    with netns.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as sock:
        found: list[ListeningSocket] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            sock.sendto(_request(family, port), (0, 0))
            # The kernel puts the answer there while it takes the request.
            while _take(sock.recv(_RECEIVE_BYTES), found):
                pass
    return sorted(found)


def is_open(found: Iterable[ListeningSocket], port: int, addresses: Iterable[str]) -> bool:
    """Whether one of the listeners takes connections to one of the addresses."""
    asked = tuple(addresses)
    return any(
        listener.port == port and any(listener.accepts(address) for address in asked)
        for listener in found
    )


def _request(family: int, port: int) -> bytes:
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _LISTENING)
    body += _PORT.pack(port) + bytes(_ID_BYTES - _PORT.size)
    header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 0, 0)
    return header + body


def _take(data: bytes, found: list[ListeningSocket]) -> bool:
    """Read netlink messages; False at the end of the answer. Raises OSError."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if kind == _NLMSG_DONE:
            return False
        if kind == _NLMSG_ERROR:
            (code,) = struct.unpack_from("=i", data, at + _HEADER.size)
            if code == -errno.ENOENT:  # a kernel without IPv6
                return False
            raise OSError(-code, f"sock_diag: {os.strerror(-code)}")
        found.append(_listener(data[at + _HEADER.size : at + length]))
        at += (length + 3) & ~3
    return True


def _listener(message: bytes) -> ListeningSocket:
    family = message[0]
    (port,) = _PORT.unpack_from(message, 4)
    size = 4 if family == socket.AF_INET else 16
    address = socket.inet_ntop(family, message[8 : 8 + size])
    is_v6_only = False
    at = _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _SKV6ONLY:
            is_v6_only = bool(message[at + _ATTRIBUTE.size])
        at += max(4, (length + 3) & ~3)
    return ListeningSocket(address, port, is_v6_only)
