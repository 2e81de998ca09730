"""Carried connections, between real sockets on the loopback."""

import contextlib
import errno
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from agent.relay.connection import Carried
from agent.relay.epoll import Poller
from agent.relay.messages import WantedTarget
from agent.relay.targets import Target

_MEGABYTE = 1 << 20
_LIMIT_ROUNDS = 20_000


class Line:
    """A client and a server, with a carried connection between the two."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.poller = Poller()
        stack.callback(self.poller.close)
        self.client, kubelet = _pair(stack)
        pod, self.server = _pair(stack)
        for sock in (kubelet, pod):
            sock.setblocking(False)
        for sock in (self.client, self.server):
            sock.settimeout(0)
        self.ends: list[bool] = []
        wanted = WantedTarget("key", "/run/netns/a", 1, 1, "198.18.1.1", (), ())
        self.carried = Carried(
            self.poller,
            kubelet,
            pod,
            target=Target(wanted, ipaddress.ip_address("198.18.64.16")),
            port=80,
            open_seconds=0.0,
            on_end=lambda carried, was_reset: self.ends.append(was_reset),
        )
        stack.callback(self.carried.finish)

    def turn(self, until: Callable[[], bool]) -> None:
        """Let the relay work until something is so."""
        for _ in range(_LIMIT_ROUNDS):
            if until():
                return
            self.poller.poll(0.01)
        raise AssertionError("it does not come")

    def receive(self, sock: socket.socket, count: int) -> bytes:
        """So many bytes, or fewer if it ends."""
        got = bytearray()

        def has_enough() -> bool:
            with contextlib.suppress(BlockingIOError):
                data = sock.recv(count - len(got))
                got.extend(data)
                return not data or len(got) == count
            return False

        self.turn(has_enough)
        return bytes(got)


@pytest.fixture
def line() -> Iterator[Line]:
    with contextlib.ExitStack() as stack:
        yield Line(stack)


def test_bytes_go_both_ways(line: Line) -> None:
    line.client.send(b"GET / HTTP/1.1\r\n\r\n")
    assert line.receive(line.server, 18) == b"GET / HTTP/1.1\r\n\r\n"
    line.server.send(b"HTTP/1.1 200 OK\r\n\r\n")
    assert line.receive(line.client, 19) == b"HTTP/1.1 200 OK\r\n\r\n"
    assert not line.ends


def test_who_has_sent_all_still_hears_the_answer(line: Line) -> None:
    line.client.send(b"question")
    line.client.shutdown(socket.SHUT_WR)
    assert line.receive(line.server, 100) == b"question"
    line.server.send(b"answer")
    assert line.receive(line.client, 6) == b"answer"
    assert not line.ends
    line.server.close()
    assert line.receive(line.client, 100) == b""
    line.turn(lambda: line.ends == [False])


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_reset_is_a_reset_for_the_other(line: Line, who: str) -> None:
    one, other = (line.client, line.server) if who == "client" else (line.server, line.client)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()
    line.turn(lambda: bool(line.ends))
    with pytest.raises(ConnectionResetError):
        line.receive(other, 1)
    assert line.ends == [who == "server"]


def test_what_was_sent_before_a_reset_arrives(line: Line) -> None:
    line.server.send(b"last words")
    line.turn(lambda: _waiting(line.client) == 10)
    line.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.server.close()
    line.turn(lambda: bool(line.ends))
    assert line.client.recv(100) == b"last words"
    with pytest.raises(ConnectionResetError):
        line.client.recv(1)


def test_a_slow_reader_slows_its_sender_and_loses_nothing(line: Line) -> None:
    sent = 0
    pattern = bytes(range(256)) * 4096

    def is_stuck() -> bool:
        nonlocal sent
        try:
            offset = sent % _MEGABYTE
            sent += line.server.send(pattern[offset:])
        except BlockingIOError:
            return not _can_move(line)
        return False

    line.turn(is_stuck)
    # Buffers of four sockets and one of ours: no more can be on its way.
    assert sent < 64 * _MEGABYTE
    line.server.shutdown(socket.SHUT_WR)
    got = line.receive(line.client, sent + 1)
    assert len(got) == sent
    assert got == (pattern * (sent // _MEGABYTE + 1))[:sent]


def test_a_sender_that_closes_while_its_reader_is_slow_costs_no_processor_time(line: Line) -> None:
    """A socket that is hung up is told by epoll without end, unless it is not waited for."""
    with contextlib.suppress(BlockingIOError):
        while True:
            line.server.send(bytes(_MEGABYTE))
            line.poller.poll(0)
    for _ in range(50):
        line.poller.poll(0)
    line.client.shutdown(socket.SHUT_WR)
    line.server.close()
    for _ in range(50):
        line.poller.poll(0)
    calls = 0
    original = line.carried.pod.on_event

    class Counting:
        def on_event(self, events: int) -> None:
            nonlocal calls
            calls += 1
            original(events)

    for fd in list(line.poller._watchers):
        line.poller._watchers[fd] = Counting()
    for _ in range(20):
        line.poller.poll(0)
    assert calls == 0


def test_ending_by_ourselves_resets_both(line: Line) -> None:
    line.carried.reset()
    assert line.ends == [False]
    for sock in (line.client, line.server):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET


def _pair(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        server, _ = listener.accept()
        return client, stack.enter_context(server)


def _waiting(sock: socket.socket) -> int:
    try:
        return len(sock.recv(1 << 16, socket.MSG_PEEK))
    except BlockingIOError:
        return 0


def _can_move(line: Line) -> bool:
    """Whether the relay finds anything to do."""
    before = _waiting(line.client)
    line.poller.poll(0)
    return _waiting(line.client) != before
