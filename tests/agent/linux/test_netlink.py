"""Requests to route netlink, and what the kernel's responses may be."""

import asyncio
import errno
import os
import socket
import struct
import threading
from typing import cast

import pytest

from agent.linux import netlink, rtnetlink
from probes.netns import Netns

_GETLINK = 18
_LINK = struct.Struct("=BxHiII")
_DUMP_INTERRUPTED = 0x10
_DONE = 3


class Kernel:
    """Answers each request with the next of its responses, from the other end of a pair."""

    def __init__(self, *responses: list[bytes]) -> None:
        self._responses = list(responses)
        self._ends: list[socket.socket] = []

    def open(self, netns: Netns | None, *, is_strict: bool = False) -> socket.socket:
        end, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.setblocking(False)
        ours.setblocking(False)
        # The kernel has each response ready before the request's send(2) returns.
        for response in self._responses:
            for datagram in response:
                ours.send(datagram)
        self._ends.append(ours)
        return end

    @property
    def remaining(self) -> int:
        """Responses that were not requested."""
        (ours,) = self._ends
        # Clears the error that responses were not read.
        ours.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        requests = 0
        while ours.recv(1 << 16):
            requests += 1
        return len(self._responses) - requests

    def close(self) -> None:
        for end in self._ends:
            end.close()


def message(kind: int, body: bytes, flags: int = 0) -> bytes:
    content = struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body
    return content + bytes(-len(content) % 4)


def link(number: int, flags: int = 0) -> bytes:
    return message(16, _LINK.pack(0, 1, number, 1, 0), flags)


def done(flags: int = 0, error: int = 0) -> bytes:
    return message(_DONE, struct.pack("=i", -error), flags)


async def dumped(monkeypatch: pytest.MonkeyPatch, *responses: list[bytes]) -> tuple[list[int], int]:
    """The links of a dump, and how many of the responses were not read."""
    kernel = Kernel(*responses)
    monkeypatch.setattr(netlink, "opened", kernel.open)
    try:
        return [found.index for found in await rtnetlink.read()], kernel.remaining
    finally:
        kernel.close()


async def test_all_messages_of_all_datagrams_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    response = [link(1) + link(2), link(3), done()]
    assert await dumped(monkeypatch, response) == ([1, 2, 3], 0)


async def test_dump_that_changed_meanwhile_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [link(1), done(_DUMP_INTERRUPTED)]
    whole = [link(1) + link(2), done()]
    assert await dumped(monkeypatch, changed, whole, whole) == ([1, 2], 1)


async def test_dump_that_always_changes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    responses = [[link(1, _DUMP_INTERRUPTED), done()] for _ in range(10)]
    assert await dumped(monkeypatch, *responses) == ([1], 5)


async def test_error_at_the_end_of_a_dump_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
        await dumped(monkeypatch, [link(1), done(error=errno.ENODEV)])


async def test_late_response_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.setblocking(False)
    monkeypatch.setattr(netlink, "opened", lambda netns, is_strict: end)
    with ours:
        reading = asyncio.create_task(rtnetlink.read())
        await asyncio.sleep(0)
        assert not reading.done()
        ours.send(link(7))
        ours.send(done())
        assert [found.index for found in await reading] == [7]


class Held(socket.socket):
    """Its send(2) waits for a lock of the kernel, which the event loop releases here."""

    released = threading.Event()
    was_released = False

    def send(self, *_: object) -> int:
        Held.was_released = self.released.wait(10)
        return 0


async def test_event_loop_runs_while_a_request_waits_for_a_lock_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held = Held(fileno=end.detach())
    monkeypatch.setattr(netlink, "opened", lambda netns, is_strict: held)
    with ours:
        ours.send(link(7))
        ours.send(done())
        reading = asyncio.create_task(rtnetlink.read())
        await asyncio.sleep(0)
        Held.released.set()
        assert [found.index for found in await reading] == [7]
    assert Held.was_released


async def test_the_kernels_error_is_raised() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
        await netlink.request(_GETLINK, _LINK.pack(0, 0, 2**31 - 1, 0, 0))


@pytest.mark.parametrize("is_strict", [True, False])
def test_socket_hears_the_kernel_alone_which_filters_on_request(is_strict: bool) -> None:
    address = (socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    with netlink.opened(None, is_strict=is_strict) as sock, socket.socket(*address) as other:
        # The second is without rights.
        with pytest.raises((ConnectionRefusedError, PermissionError)):
            other.sendto(link(7), sock.getsockname())
        # SOL_NETLINK, NETLINK_GET_STRICT_CHK
        assert sock.getsockopt(270, 12) == is_strict


def test_socket_that_cannot_filter_is_closed() -> None:
    """As on a kernel before 4.20."""

    class Old(socket.socket):
        def setsockopt(self, *_: object) -> None:
            raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))

    class Namespace:
        def socket(self, *address: int) -> socket.socket:
            return old

    old = Old(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    with pytest.raises(OSError, match="Protocol not available"):
        netlink.opened(cast(Netns, Namespace()), is_strict=True)
    assert old.fileno() == -1


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM, errno.EMFILE])
def test_interface_is_unknown_where_no_memory_is_left(number: int) -> None:
    """One that counts as gone would lose its gate."""

    class Exhausted:
        def __init__(self, number: int) -> None:
            self._number = number

        def request(self, *_: object) -> list[bytes]:
            raise OSError(self._number, os.strerror(self._number))

    with pytest.raises(OSError, match=os.strerror(number)):
        rtnetlink.found_in(cast(netlink.Exchange, Exhausted(number)), 7)
    gone = cast(netlink.Exchange, Exhausted(errno.ENODEV))
    assert rtnetlink.found_in(gone, 7) is None


async def test_requests_of_several_tasks_do_not_mix() -> None:
    found = await asyncio.gather(*(rtnetlink.find(1) for _ in range(20)))
    assert [one and one.name for one in found] == ["lo"] * 20
    assert await rtnetlink.find(2**31 - 1) is None


async def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await rtnetlink.read()
        await rtnetlink.find(2**31 - 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_messages_that_are_as_in_the_last_dump_are_not_parsed_again() -> None:
    parsed: list[bytes] = []

    def parse(content: bytes) -> int:
        parsed.append(content)
        return len(parsed)

    table = netlink.ParsedDump(parse)
    first, second, third = link(1), link(2), link(3)
    assert table.of([first, second]) == [1, 2]
    # Another dump is another request, with a port of its own in each header.
    again = first[:12] + b"port" + first[16:]
    assert table.of([third, again]) == [3, 1]
    assert table.of([second]) == [4]
    assert parsed == [first, second, third, second]
