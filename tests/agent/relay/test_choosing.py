"""Connections to shared ports wait for their first request, and never for long."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agent.relay.choosing import Choice, Choosing
from agent.relay.epoll import EpollPoller

REQUEST = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"


class Relay:
    """The end of the relay; `chosen` are the connections with a request."""

    def __init__(self) -> None:
        self.now = 100.0
        self.poller = EpollPoller()
        self.chosen: list[Choice] = []
        self.choosing = Choosing(self.poller, on_request=self.chosen.append, now=lambda: self.now)
        self.claimant: Any = object()

    def connect(self) -> socket.socket:
        """The kubelet's end of a connection that was accepted."""
        listener = socket.create_server(("127.0.0.1", 0))
        kubelet = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        listener.close()
        self.choosing.add(Choice(accepted, self.claimant, 8080, 0.01))
        kubelet.settimeout(30)
        return kubelet

    def poll_until_chosen(self) -> Choice:
        for _ in range(300):
            if self.chosen:
                return self.chosen[0]
            self.poller.poll(0.1)
        raise AssertionError("nothing was chosen")


@pytest.fixture
def relay() -> Iterator[Relay]:
    made = Relay()
    yield made
    made.poller.close()
    for choice in made.chosen:
        choice.kubelet.close()


def test_request_in_pieces_is_decided_when_it_is_complete(relay: Relay) -> None:
    with relay.connect() as kubelet:
        for piece in (REQUEST[:3], REQUEST[3:20]):
            kubelet.sendall(piece)
            relay.poller.poll(30)
            assert relay.chosen == []
        kubelet.sendall(REQUEST[20:])
        assert relay.poll_until_chosen().received == REQUEST
        assert len(relay.choosing) == 0


def test_event_without_data_never_waits_for_data(relay: Relay) -> None:
    """Accepted sockets are blocking, and an event may be of a previous socket of the number."""
    with relay.connect() as kubelet:
        (undecided,) = relay.choosing._undecided
        late = threading.Timer(2, kubelet.sendall, [b"G"])
        late.start()
        relay.choosing.on_readable(undecided)
        assert undecided.choice.received == b""
        late.join()
        relay.choosing.abandon(relay.claimant)


def test_what_is_no_http_is_decided_at_once(relay: Relay) -> None:
    with relay.connect() as kubelet:
        kubelet.sendall(b"\x16\x03\x01")
        assert relay.poll_until_chosen().received == b"\x16\x03\x01"


def test_connection_without_a_complete_request_is_decided_after_a_while(relay: Relay) -> None:
    with relay.connect() as kubelet:
        kubelet.sendall(REQUEST[:5])
        relay.poller.poll(30)
        relay.choosing.expire()
        assert relay.chosen == []
        relay.now += 6
        relay.choosing.expire()
        assert [choice.received for choice in relay.chosen] == [REQUEST[:5]]


def test_connection_that_ends_without_a_request_is_closed(relay: Relay) -> None:
    with relay.connect():
        pass
    relay.poller.poll(30)
    assert len(relay.choosing) == 0
    assert relay.chosen == []


def test_connections_of_a_removed_target_are_reset(relay: Relay) -> None:
    with relay.connect() as kubelet:
        relay.choosing.abandon(relay.claimant)
        with pytest.raises(ConnectionResetError):
            kubelet.recv(1)
    assert len(relay.choosing) == 0
