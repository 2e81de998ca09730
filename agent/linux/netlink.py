"""Requests to route netlink of a network namespace, for the event loop.

A request has a socket of its own: no response can be another's, and nothing is shared. send(2) and
recv(2) wait in the kernel for RTNL, which another program may hold for seconds, such as one that
changes interfaces on a busy machine. So they run in threads, and the event loop continues.
"""

import asyncio
import concurrent.futures
import socket
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from bpf import netlink
from bpf.netlink import HEADER_BYTES, NLM_F_ACK, NLM_F_DUMP
from probes.netns import Netns

T = TypeVar("T")

_SOL_NETLINK, _NETLINK_GET_STRICT_CHK = 270, 12
# Interfaces come and go while a busy node's are read.
_MOST_DUMPS = 5
# The kernel answers before send(2) returns, however long it waits there.
_TIMEOUT_SECONDS = 10.0

# Of their own: while RTNL is held, nothing else waits for one. More would wait for the same lock.
_threads = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="netlink")


async def request(
    kind: int, body: bytes, *, netns: Netns | None = None, flags: int = 0
) -> list[bytes]:
    """Each message of the response, with its header; none to a request with NLM_F_ACK.

    kind: RTM_*; body: a struct and attributes; netns: this process's if None. Raises `OSError` with
    the kernel's error, and `NetnsGoneError`. The caller limits the time.
    """
    return await within(lambda link: link.request(kind, body, flags), netns=netns)


async def dump(
    kind: int, body: bytes, *, netns: Netns | None = None, is_filtered: bool = False
) -> list[bytes]:
    """All messages of a table, as of one moment if it does not change all the time.

    is_filtered: the kernel is to send only what matches `body`. The rest is as of `request`.
    """
    return await within(lambda link: link.dump(kind, body), netns=netns, is_filtered=is_filtered)


class Exchange:
    """Requests to one namespace, one after the other, in a thread that may wait."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(_TIMEOUT_SECONDS)

    def request(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        """As the function `request`."""
        return self._exchange(kind, body, flags)[0]

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """As the function `dump`."""
        for _ in range(_MOST_DUMPS):
            found, is_consistent = self._exchange(kind, body, NLM_F_DUMP)
            if is_consistent:
                break
        # After all these the next notification leads to the next one.
        return found

    def _exchange(self, kind: int, body: bytes, flags: int) -> tuple[list[bytes], bool]:
        """The messages, and whether they are of one moment."""
        found: list[bytes] = []
        is_consistent = True
        self._socket.send(netlink.encode(kind, flags, body))
        has_end = bool(flags & (NLM_F_DUMP | NLM_F_ACK))
        while True:
            for part in netlink.decode(self._socket.recv(netlink.RECEIVE_BYTES)):
                is_consistent = is_consistent and not part.is_interrupted
                if part.is_last:
                    netlink.check(part)
                    return found, is_consistent
                found.append(part.content)
            if not has_end:
                return found, is_consistent


async def within(
    call: Callable[[Exchange], T], *, netns: Netns | None = None, is_filtered: bool = False
) -> T:
    """What `call` returns, or raises, in a thread: several requests with one change of threads,
    which takes longer than most responses.

    Raises `OSError` and `NetnsGoneError` without a socket. The caller limits the time.
    """
    sock = opened(netns, is_strict=is_filtered)
    future = _threads.submit(lambda: call(Exchange(sock)))
    # Also of a request that is cancelled before a thread has it, and not while one uses it.
    future.add_done_callback(lambda _: sock.close())
    return await asyncio.wrap_future(future)


class ParsedDump(Generic[T]):
    """A table that is dumped again and again: only messages that differ from the last dump are
    parsed. A node has some links and addresses for each pod, and most are as they were."""

    def __init__(self, parse: Callable[[bytes], T]) -> None:
        """parse: gets a message with its header, whose content is not to count: its sequence number
        and port differ by dump."""
        self._parse = parse
        self._last: dict[bytes, T] = {}

    def of(self, messages: Iterable[bytes]) -> list[T]:
        """What the messages of a dump are parsed as, in their order."""
        before, self._last = self._last, {}
        found = []
        for message in messages:
            content = message[HEADER_BYTES:]
            parsed = before[content] if content in before else self._parse(message)
            self._last[content] = parsed
            found.append(parsed)
        return found


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
