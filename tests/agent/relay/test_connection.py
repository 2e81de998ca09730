"""Proxied connections, between real sockets on the loopback."""

import contextlib
import errno
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.relay.connection import Connection
from agent.relay.epoll import EpollPoller
from agent.relay.messages import RelayTargetSpec
from agent.relay.targets import RelayTarget

_MEGABYTE = 1 << 20
_LIMIT_ROUNDS = 20_000


class Line:
    """A client and a server, connected by the relay."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.poller = EpollPoller()
        stack.callback(self.poller.close)
        self.client, kubelet = _pair(stack)
        pod, self.server = _pair(stack)
        for sock in (kubelet, pod):
            sock.setblocking(False)
        for sock in (self.client, self.server):
            sock.settimeout(0)
        self.closed: list[bool] = []
        spec = RelayTargetSpec("key", "/run/netns/a", 1, 1, "198.18.1.1", (), ())
        self.connection = Connection(
            self.poller,
            kubelet,
            pod,
            target=RelayTarget(spec, ipaddress.ip_address("198.18.64.16")),
            port=80,
            open_seconds=0.0,
            on_closed=lambda connection, was_reset: self.closed.append(was_reset),
        )
        stack.callback(self.connection.finish)

    def turn(self, until: Callable[[], bool]) -> None:
        """Run the relay until the condition is true."""
        for _ in range(_LIMIT_ROUNDS):
            if until():
                return
            self.poller.poll(0.01)
        raise AssertionError("the condition never became true")

    def receive(self, sock: socket.socket, count: int) -> bytes:
        """This number of bytes, or fewer if the peer closes."""
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
    assert not line.closed


def test_response_arrives_after_a_half_close(line: Line) -> None:
    line.client.send(b"question")
    line.client.shutdown(socket.SHUT_WR)
    assert line.receive(line.server, 100) == b"question"
    line.server.send(b"answer")
    assert line.receive(line.client, 6) == b"answer"
    assert not line.closed
    line.server.close()
    assert line.receive(line.client, 100) == b""
    line.turn(lambda: line.closed == [False])


@pytest.mark.parametrize("side", ["client", "server"])
def test_reset_by_one_end_resets_the_other(line: Line, side: str) -> None:
    near, far = (line.client, line.server) if side == "client" else (line.server, line.client)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()
    line.turn(lambda: bool(line.closed))
    with pytest.raises(ConnectionResetError):
        line.receive(far, 1)
    assert line.closed == [side == "server"]


def test_data_sent_before_a_reset_arrives(line: Line) -> None:
    line.server.send(b"last words")
    line.turn(lambda: _waiting(line.client) == 10)
    line.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.server.close()
    line.turn(lambda: bool(line.closed))
    assert line.client.recv(100) == b"last words"
    with pytest.raises(ConnectionResetError):
        line.client.recv(1)


def test_slow_reader_delays_the_other_end_and_loses_no_data(line: Line) -> None:
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
    # Four socket buffers and one of the relay: no more data can be in transit.
    assert sent < 64 * _MEGABYTE
    line.server.shutdown(socket.SHUT_WR)
    got = line.receive(line.client, sent + 1)
    assert len(got) == sent
    assert got == (pattern * (sent // _MEGABYTE + 1))[:sent]


class Narrow:
    """A socket that takes three bytes at a time."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def send(self, data: bytes, flags: int) -> int:
        sent: int = self._sock.send(bytes(data)[:3], flags)
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_what_a_socket_does_not_take_at_once_is_sent_later(line: Line) -> None:
    for side in (line.connection.kubelet, line.connection.pod):
        side._socket = Narrow(side._socket)  # type: ignore[assignment]
    line.client.send(b"GET / HTTP/1.1\r\n\r\n")
    assert line.receive(line.server, 18) == b"GET / HTTP/1.1\r\n\r\n"
    line.client.send(b"more")
    line.client.shutdown(socket.SHUT_WR)
    assert line.receive(line.server, 100) == b"more"
    line.server.send(b"answer")
    assert line.receive(line.client, 6) == b"answer"
    assert not line.closed
    assert _events(line) == 0


class Full(Narrow):
    """A socket that takes nothing at first."""

    is_full = True

    def send(self, data: bytes, flags: int) -> int:
        if self.is_full:
            self.is_full = False
            raise BlockingIOError
        return super().send(data, flags)


@pytest.mark.parametrize("side", ["kubelet", "pod"])
def test_data_waits_for_a_socket_that_takes_none(line: Line, side: str) -> None:
    full = line.connection.kubelet if side == "kubelet" else line.connection.pod
    full._socket = Full(full._socket)  # type: ignore[assignment]
    near, far = (line.client, line.server) if side == "pod" else (line.server, line.client)
    near.send(b"GET / HTTP/1.1\r\n\r\n")
    assert line.receive(far, 18) == b"GET / HTTP/1.1\r\n\r\n"
    assert not line.closed


class Broken(Narrow):
    """A socket that fails, at once or after three bytes."""

    def __init__(self, sock: Any, *, is_at_once: bool) -> None:
        super().__init__(sock)
        self._is_broken = is_at_once

    def send(self, data: bytes, flags: int) -> int:
        if self._is_broken:
            raise OSError(errno.EPIPE, "Broken pipe")
        self._is_broken = True
        return super().send(data, flags)


@pytest.mark.parametrize("is_at_once", [True, False])
@pytest.mark.parametrize("side", ["kubelet", "pod"])
def test_failure_to_send_ends_the_connection(line: Line, side: str, is_at_once: bool) -> None:
    broken = line.connection.kubelet if side == "kubelet" else line.connection.pod
    broken._socket = Broken(broken._socket, is_at_once=is_at_once)  # type: ignore[assignment]
    near, far = (line.client, line.server) if side == "pod" else (line.server, line.client)
    near.send(b"GET / HTTP/1.1\r\n\r\n")
    line.turn(lambda: bool(line.closed))
    assert line.closed == [side == "pod"]
    assert line.receive(far, 18) == (b"" if is_at_once else b"GET")
    with pytest.raises(ConnectionResetError):
        near.recv(1)


class Unusable(Narrow):
    """A socket of which one call fails."""

    def __init__(self, sock: Any, call: str) -> None:
        super().__init__(sock)
        setattr(self, call, self._fail)

    @staticmethod
    def _fail(*_: object) -> int:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")


@pytest.mark.parametrize("call", ["recv_into", "shutdown"])
@pytest.mark.parametrize("side", ["kubelet", "pod"])
def test_failure_to_read_or_to_pass_on_an_end_resets_the_other_side(
    line: Line, side: str, call: str
) -> None:
    failing = line.connection.kubelet if side == "kubelet" else line.connection.pod
    failing._socket = Unusable(failing._socket, call)  # type: ignore[assignment]
    near, far = (line.client, line.server) if side == "kubelet" else (line.server, line.client)
    if call == "recv_into":
        near.send(b"GET / HTTP/1.1\r\n\r\n")
    else:
        far.shutdown(socket.SHUT_WR)
    line.turn(lambda: bool(line.closed))
    assert line.closed == [side == "pod"]
    with pytest.raises(ConnectionResetError):
        far.recv(1)


def test_close_before_a_slow_reader_costs_no_cpu_and_loses_no_data(line: Line) -> None:
    """epoll reports a hung-up socket in every round, unless it is unregistered."""
    sent = 0
    while not line.connection.kubelet._unsent:
        sent += line.server.send(bytes(1 << 16))
        line.poller.poll(0)
    # Few enough for the relay's socket to get the FIN behind them.
    sent += line.server.send(bytes(1 << 10))
    line.client.shutdown(socket.SHUT_WR)
    line.server.close()
    for _ in range(50):
        line.poller.poll(0)
    assert _events(line) == 0
    assert len(line.receive(line.client, sent + 1)) == sent
    line.turn(lambda: line.closed == [False])


def _errors(line: Line) -> list[int]:
    return [
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for sock in (line.client, line.server)
    ]


def test_reset_by_the_relay_resets_both_ends(line: Line) -> None:
    line.connection.reset()
    assert line.closed == [False]
    assert _errors(line) == [errno.ECONNRESET] * 2


def test_connection_that_the_relay_ends_is_closed_at_both_ends_and_reported_once(
    line: Line,
) -> None:
    descriptors = [side._socket.fileno() for side in (line.connection.kubelet, line.connection.pod)]
    line.connection.finish()
    assert (line.client.recv(1), line.server.recv(1)) == (b"", b"")
    assert not any(map(line.poller.is_registered, descriptors))
    line.connection.finish()
    line.connection.reset()
    assert line.closed == [False]
    assert _errors(line) == [0, 0]


def test_what_came_before_the_connection_is_sent_to_the_pod_first(line: Line) -> None:
    line.connection.pass_on(b"GET / ")
    line.client.send(b"HTTP/1.1\r\n\r\n")
    assert line.receive(line.server, 18) == b"GET / HTTP/1.1\r\n\r\n"


def test_second_request_on_a_connection_for_one_is_reset_and_its_end_is_not(line: Line) -> None:
    line.connection.kubelet.is_spent = True
    line.server.send(b"response")
    assert line.receive(line.client, 8) == b"response"
    line.client.send(b"GET / HTTP/1.1\r\n\r\n")
    line.turn(lambda: bool(line.closed))
    assert line.closed == [False]
    assert _errors(line) == [errno.ECONNRESET] * 2


def test_connection_for_one_request_ends_as_others_do(line: Line) -> None:
    line.connection.kubelet.is_spent = True
    line.client.shutdown(socket.SHUT_WR)
    assert line.receive(line.server, 1) == b""
    assert not line.closed


@pytest.mark.parametrize("side", ["client", "server"])
def test_end_of_one_direction_makes_a_connection_half_closed(line: Line, side: str) -> None:
    assert not line.connection.is_half_closed
    near, far = (line.client, line.server) if side == "client" else (line.server, line.client)
    near.shutdown(socket.SHUT_WR)
    assert line.receive(far, 1) == b""
    assert line.connection.is_half_closed


def test_connection_is_active_after_an_event(line: Line) -> None:
    assert line.connection.is_active
    line.connection.is_active = False
    line.poller.poll(0)
    assert not line.connection.is_active
    line.server.send(b"response")
    assert line.receive(line.client, 8) == b"response"
    assert line.connection.is_active


def _pair(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        server, _ = listener.accept()
        return client, stack.enter_context(server)


def _events(line: Line) -> int:
    """How many events the relay handles in the next rounds."""
    count = 0

    class Counting:
        def __init__(self, handler: Any) -> None:
            self._handler = handler

        def on_event(self, events: int) -> None:
            nonlocal count
            count += 1
            self._handler.on_event(events)

    handlers = line.poller._handlers
    handlers.update({fd: Counting(handler) for fd, handler in handlers.items()})
    for _ in range(20):
        line.poller.poll(0)
    return count


def _waiting(sock: socket.socket) -> int:
    try:
        return len(sock.recv(1 << 16, socket.MSG_PEEK))
    except BlockingIOError:
        return 0


def _can_move(line: Line) -> bool:
    """Whether the relay can move data."""
    before = _waiting(line.client)
    line.poller.poll(0)
    return _waiting(line.client) != before
