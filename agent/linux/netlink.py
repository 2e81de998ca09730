"""Requests to route netlink of a network namespace, on the event loop.

pyroute2 takes some ms of CPU for what the kernel answers in 50 us: it makes a socket with filters,
queues and a transport for each user, and decodes every attribute. A crowd of pods is thousands of
requests, so those that each pod needs are made here; pyroute2 configures interfaces and routes.

A request has a socket of its own: no response can be another's, and nothing is shared.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Iterator

from probes.netns import Netns

# include/uapi/linux/netlink.h
_NLM_F_REQUEST, NLM_F_ACK = 0x1, 0x4
NLM_F_REPLACE, NLM_F_CREATE = 0x100, 0x400
_NLM_F_DUMP = 0x300
_NLM_F_DUMP_INTR = 0x10  # what is dumped changed meanwhile, so something may be missing
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_SOL_NETLINK, _NETLINK_GET_STRICT_CHK = 270, 12

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
HEADER_BYTES = _HEADER.size
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
_ERROR = struct.Struct("=i")
_KERNEL = (0, 0)
# The kernel fills at most 32 KiB (net/netlink/af_netlink.c: netlink_recvmsg).
_RECEIVE_BYTES = 32 << 10
# Interfaces come and go while a busy node's are read.
_MOST_DUMPS = 5


async def request(
    kind: int, body: bytes, *, netns: Netns | None = None, flags: int = 0
) -> list[bytes]:
    """Each message of the response, with its header; none to a request with NLM_F_ACK.

    kind: RTM_*; body: a struct and attributes; netns: this process's if None. Raises `OSError` with
    the kernel's error, and `NetnsGoneError`. The caller limits the time.
    """
    found, _ = await _request(kind, body, netns, flags)
    return found


async def dump(
    kind: int, body: bytes, *, netns: Netns | None = None, is_filtered: bool = False
) -> list[bytes]:
    """All messages of a table, as of one moment if it does not change all the time.

    is_filtered: the kernel is to send only what matches `body`. The rest is as of `request`.
    """
    for _ in range(_MOST_DUMPS):
        found, is_consistent = await _request(kind, body, netns, _NLM_F_DUMP, is_strict=is_filtered)
        if is_consistent:
            break
    # After all these the next notification leads to the next one.
    return found


async def _request(
    kind: int, body: bytes, netns: Netns | None, flags: int, *, is_strict: bool = False
) -> tuple[list[bytes], bool]:
    """The messages, and whether they are of one moment."""
    loop = asyncio.get_running_loop()
    found: list[bytes] = []
    is_consistent = True
    with opened(netns, is_strict=is_strict) as sock:
        header = _HEADER.pack(HEADER_BYTES + len(body), kind, flags | _NLM_F_REQUEST, 1, 0)
        sock.send(header + body)
        while True:
            for message in _messages(await loop.sock_recv(sock, _RECEIVE_BYTES)):
                _, type_, received, _, _ = _HEADER.unpack_from(message)
                is_consistent = is_consistent and not received & _NLM_F_DUMP_INTR
                if type_ in (_NLMSG_ERROR, _NLMSG_DONE):
                    _check(message)
                    return found, is_consistent
                found.append(message)
            if not flags & (_NLM_F_DUMP | NLM_F_ACK):
                return found, True


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute of a request."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(message: bytes, at: int, end: int | None = None) -> dict[int, bytes]:
    """The values by kind. at, end: of all of them, in the message."""
    found: dict[int, bytes] = {}
    end = len(message) if end is None else end
    while at + _ATTRIBUTE.size <= end:
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if size < _ATTRIBUTE.size:
            break
        found[kind & _TYPE_MASK] = message[at + _ATTRIBUTE.size : at + size]
        at += (size + 3) & ~3
    return found


def opened(netns: Netns | None, *, is_strict: bool = False) -> socket.socket:
    """A socket for one request, of a namespace. Raises `OSError` and `NetnsGoneError`."""
    address = (socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    sock = netns.socket(*address) if netns else socket.socket(*address)
    try:
        sock.setblocking(False)
        # Only the kernel's messages: a process of a pod can send to a socket in its namespace.
        sock.connect(_KERNEL)
        if is_strict:
            # The kernel filters what it dumps (Linux 4.20).
            sock.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + HEADER_BYTES <= len(data):
        (length,) = struct.unpack_from("=I", data, at)
        if length < HEADER_BYTES:
            return
        yield data[at : at + length]
        at += (length + 3) & ~3


def _check(message: bytes) -> None:
    """Raise the error that a response ends with."""
    if len(message) < HEADER_BYTES + _ERROR.size:
        return
    (negative,) = _ERROR.unpack_from(message, HEADER_BYTES)
    if negative < 0:
        raise OSError(-negative, os.strerror(-negative))
