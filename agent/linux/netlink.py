"""Requests to route netlink of a network namespace, on the event loop.

A request has a socket of its own: no response can be another's, and nothing is shared.
"""

import asyncio
import socket

from bpf import netlink
from bpf.netlink import NLM_F_ACK, NLM_F_DUMP
from probes.netns import Netns

_SOL_NETLINK, _NETLINK_GET_STRICT_CHK = 270, 12
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
        found, is_consistent = await _request(kind, body, netns, NLM_F_DUMP, is_strict=is_filtered)
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
        sock.send(netlink.encode(kind, flags, body))
        while True:
            for message in netlink.decode(await loop.sock_recv(sock, netlink.RECEIVE_BYTES)):
                is_consistent = is_consistent and not message.is_interrupted
                if message.is_last:
                    netlink.check(message)
                    return found, is_consistent
                found.append(message.content)
            if not flags & (NLM_F_DUMP | NLM_F_ACK):
                return found, True


def opened(netns: Netns | None, *, is_strict: bool = False) -> socket.socket:
    """A socket for one request, of a namespace. Raises `OSError` and `NetnsGoneError`."""
    address = (socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    sock = netns.socket(*address) if netns else socket.socket(*address)
    try:
        sock.setblocking(False)
        # Only the kernel's messages: a process of a pod can send to a socket in its namespace.
        sock.connect(netlink.KERNEL)
        if is_strict:
            # The kernel filters what it dumps (Linux 4.20).
            sock.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
    except BaseException:
        sock.close()
        raise
    return sock
