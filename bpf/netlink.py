"""Messages of netlink, and requests from a thread that may block.

pyroute2 takes some ms of CPU for what the kernel answers in 50 us: it makes a socket with filters,
queues and a transport for each user, and decodes every attribute. A crowd of pods is thousands of
requests, so an agent makes its own, here and in `agent/linux/netlink.py`.
"""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

# include/uapi/linux/netlink.h
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x4, 0x300
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
NLM_F_DUMP_INTR = 0x10
_NLMSG_ERROR, _NLMSG_DONE = 2, 3

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
HEADER_BYTES = _HEADER.size
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
_ERROR = struct.Struct("=i")
KERNEL = (0, 0)
# The kernel fills at most 32 KiB (net/netlink/af_netlink.c: netlink_recvmsg).
RECEIVE_BYTES = 32 << 10
# The kernel answers before send(2) returns, however long it waits for RTNL there.
_TIMEOUT_SECONDS = 10.0


class NetlinkError(OSError):
    """The kernel's error in its response."""


class Message(NamedTuple):
    """One message of a response. content: with its header."""

    content: bytes
    sequence: int
    is_last: bool
    is_interrupted: bool
    """What is dumped changed meanwhile, so something may be missing."""


def encode(kind: int, flags: int, body: bytes, sequence: int = 1) -> bytes:
    """A request. kind: RTM_*; body: a struct and attributes."""
    header = _HEADER.pack(HEADER_BYTES + len(body), kind, flags | NLM_F_REQUEST, sequence, 0)
    return header + body


def decode(data: bytes) -> Iterator[Message]:
    """The messages of one datagram."""
    at = 0
    while at + HEADER_BYTES <= len(data):
        length, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
        if length < HEADER_BYTES:
            return
        is_last = kind in (_NLMSG_ERROR, _NLMSG_DONE)
        content = data[at : at + length]
        yield Message(content, sequence, is_last, bool(flags & NLM_F_DUMP_INTR))
        at += (length + 3) & ~3


def check(last: Message) -> None:
    """Raise the `NetlinkError` that a response ends with."""
    if len(last.content) >= HEADER_BYTES + _ERROR.size:
        (negative,) = _ERROR.unpack_from(last.content, HEADER_BYTES)
        if negative < 0:
            raise NetlinkError(-negative, os.strerror(-negative))


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute of a request."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(content: bytes, at: int = 0) -> dict[int, bytes]:
    """The values by kind. at: of the first one, behind header and struct."""
    found: dict[int, bytes] = {}
    while at + _ATTRIBUTE.size <= len(content):
        size, kind = _ATTRIBUTE.unpack_from(content, at)
        if size < _ATTRIBUTE.size:
            break
        found[kind & _TYPE_MASK] = content[at + _ATTRIBUTE.size : at + size]
        at += (size + 3) & ~3
    return found


def text(value: bytes) -> str:
    """An attribute's, which ends with a zero byte."""
    return value.rstrip(b"\0").decode(errors="replace")


class RequestSocket:
    """Netlink of the namespace of the thread that creates it, for any thread."""

    def __init__(self, protocol: int = socket.NETLINK_ROUTE) -> None:
        """protocol: NETLINK_*. Raises `OSError`."""
        address = (socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket = socket.socket(*address)
        self._socket.settimeout(_TIMEOUT_SECONDS)
        self._socket.connect(KERNEL)
        self._sequence = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        self._socket.close()

    def change(self, kind: int, flags: int, body: bytes) -> list[bytes]:
        """A request that the kernel acknowledges: each message before that, usually none. Raises
        `NetlinkError`."""
        return self._request(kind, flags | NLM_F_ACK, body)

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """Each message of a table, with its header. Raises `NetlinkError`."""
        return self._request(kind, NLM_F_DUMP, body)

    def _request(self, kind: int, flags: int, body: bytes) -> list[bytes]:
        found: list[bytes] = []
        with self._lock:
            self._sequence += 1
            self._socket.send(encode(kind, flags, body, self._sequence))
            while True:
                for message in decode(self._socket.recv(RECEIVE_BYTES)):
                    # A request that raised may have left some.
                    if message.sequence != self._sequence:
                        continue
                    if message.is_last:
                        check(message)
                        return found
                    found.append(message.content)
