"""The relay's listeners, on the loopback of whoever runs the tests."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from agent.relay.epoll import Poller
from agent.relay.raw_sockets import Listeners
from agent.relay.segments import Flow


class Arrived:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        self.flows: list[Flow] = []
        self.away: list[Flow] = []

    def accepted(self, sock: socket.socket, flow: Flow) -> None:
        self.sockets.append(sock)
        self.flows.append(flow)

    def turned_away(self, flow: Flow) -> None:
        self.away.append(flow)


@pytest.fixture
def poller() -> Iterator[Poller]:
    with contextlib.closing(Poller()) as made:
        yield made


@pytest.fixture
def arrived() -> Iterator[Arrived]:
    made = Arrived()
    yield made
    for sock in made.sockets:
        sock.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_one_listener_serves_both_families_and_tells_packed_addresses(
    poller: Poller, arrived: Arrived, host: str
) -> None:
    port = _free_port()
    listeners = Listeners(poller, arrived)
    listener = listeners.prepare(port)
    assert listeners.prepare(port) is listener
    with socket.create_connection((host, port)) as client:
        poller.poll(5)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        packed = socket.inet_pton(family, host)
        assert arrived.flows == [(packed, client.getsockname()[1], packed, port)]
    listener.close(poller)


def test_a_port_that_was_not_asked_for_longest_makes_room_for_another(
    poller: Poller, arrived: Arrived, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.relay.raw_sockets._MOST_PORTS", 2)
    listeners = Listeners(poller, arrived)
    first, second, third = (_free_port() for _ in range(3))
    for port in (first, second, first, third):
        listeners.prepare(port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", second))
    for port in (first, third):
        with socket.create_connection(("127.0.0.1", port)):
            pass
    for port in (first, third):
        listeners.prepare(port).close(poller)


def test_without_a_descriptor_left_what_comes_is_reset_and_told_instead_of_spinning(
    poller: Poller, arrived: Arrived
) -> None:
    port = _free_port()
    listener = Listeners(poller, arrived).prepare(port)
    with socket.create_connection(("127.0.0.1", port)) as client:
        with _no_descriptor_left():
            poller.poll(5)
            poller.poll(0)
        assert [flow[1] for flow in arrived.away] == [client.getsockname()[1]]
        assert not arrived.sockets
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with socket.create_connection(("127.0.0.1", port)):
        poller.poll(5)
        assert len(arrived.sockets) == 1
    listener.close(poller)


@contextlib.contextmanager
def _no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is on numbers: the lowest free one is the first that is refused.
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
