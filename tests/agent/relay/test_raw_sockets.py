"""The relay's listeners, on the loopback of the test's own namespace."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from agent.relay.epoll import EpollPoller
from agent.relay.raw_sockets import PortListeners
from agent.relay.segments import Flow
from probes.netns import BareSocket


class Recorder:
    """Records accepted and rejected connections."""

    def __init__(self) -> None:
        self.sockets: list[BareSocket] = []
        self.flows: list[Flow] = []
        self.rejected: list[Flow] = []

    def on_accepted(self, sock: BareSocket, flow: Flow) -> None:
        self.sockets.append(sock)
        self.flows.append(flow)

    def on_rejected(self, flow: Flow) -> None:
        self.rejected.append(flow)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    for sock in made.sockets:
        sock.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_one_listener_accepts_both_families_and_reports_packed_addresses(
    poller: EpollPoller, recorder: Recorder, host: str
) -> None:
    port = _free_port()
    listeners = PortListeners(poller, recorder)
    listener = listeners.prepare(port)
    assert listeners.prepare(port) is listener
    with socket.create_connection((host, port)) as client:
        poller.poll(5)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        packed = socket.inet_pton(family, host)
        assert recorder.flows == [(packed, client.getsockname()[1], packed, port)]
        assert recorder.sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    listener.close(poller)


def test_least_recently_used_port_is_closed_for_another(
    poller: EpollPoller, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.relay.raw_sockets._MAX_PORTS", 2)
    listeners = PortListeners(poller, recorder)
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


def test_port_is_opened_again_while_connections_to_it_are_open(
    poller: EpollPoller, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.relay.raw_sockets._MAX_PORTS", 1)
    listeners = PortListeners(poller, recorder)
    port, other = _free_port(), _free_port()
    listeners.prepare(port)
    with socket.create_connection(("127.0.0.1", port)):
        poller.poll(5)
        listeners.prepare(other)
        listener = listeners.prepare(port)
        with socket.create_connection(("127.0.0.1", port)):
            poller.poll(5)
        assert len(recorder.sockets) == 2
    listener.close(poller)


def test_all_connections_that_wait_are_accepted_at_once(
    poller: EpollPoller, recorder: Recorder
) -> None:
    port = _free_port()
    listener = PortListeners(poller, recorder).prepare(port)
    assert not listener.accept()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert listener.accept()
        assert len(recorder.sockets) == 1
        poller.poll(5)
        assert len(recorder.sockets) == 3
    assert not listener.accept()
    listener.close(poller)
    assert not poller.is_registered(listener.fd)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_connections_are_reset_when_no_descriptor_is_left(
    poller: EpollPoller, recorder: Recorder
) -> None:
    port = _free_port()
    listener = PortListeners(poller, recorder).prepare(port)
    address = ("127.0.0.1", port)
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        with _no_descriptor_left():
            poller.poll(5)
        clients = [client.getsockname()[1] for client in (first, second)]
        assert [flow[1] for flow in recorder.rejected] == clients
        assert not recorder.sockets
        for client in (first, second):
            with pytest.raises(ConnectionResetError):
                client.recv(1)
    with socket.create_connection(("127.0.0.1", port)):
        poller.poll(5)
        assert len(recorder.sockets) == 1
    listener.close(poller)


@contextlib.contextmanager
def _no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit applies to numbers: the lowest free one is the first to fail.
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
