"""Connections to shared ports wait for their first request, and never for long."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agent.relay.choosing import Choice, Choosing
from agent.relay.epoll import EpollPoller
from agent.relay.segments import RESET_ON_CLOSE

REQUEST = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"


class Relay:
    """The end of the relay; `chosen` are the connections with a request."""

    def __init__(self) -> None:
        self.now = 100.0
        self.poller = EpollPoller()
        self.chosen: list[Choice] = []
        self.choosing = Choosing(self.poller, on_request=self.chosen.append, now=lambda: self.now)
        self.claimant: Any = object()
        self.accepted: list[socket.socket] = []

    def connect(self, claimant: Any = None) -> socket.socket:
        """The kubelet's end of a connection that was accepted."""
        listener = socket.create_server(("127.0.0.1", 0))
        kubelet = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        listener.close()
        self.accepted.append(accepted)
        self.choosing.add(Choice(accepted, claimant or self.claimant, 8080, 0.01))
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
    for accepted in made.accepted:
        accepted.close()


def test_request_in_pieces_is_decided_when_it_is_complete(relay: Relay) -> None:
    with relay.connect() as kubelet:
        for piece in (REQUEST[:3], REQUEST[3:20]):
            kubelet.sendall(piece)
            relay.poller.poll(30)
            assert relay.chosen == []
        kubelet.sendall(REQUEST[20:])
        assert relay.poll_until_chosen() == Choice(
            relay.accepted[0], relay.claimant, 8080, 0.01, REQUEST
        )
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


def test_later_connection_waits_for_longer(relay: Relay) -> None:
    with relay.connect(), relay.connect("later"):
        relay.now += 4
        with relay.connect("latest"):
            assert len(relay.choosing) == 3
            relay.now += 2
            relay.choosing.expire()
            assert {choice.claimant for choice in relay.chosen} == {relay.claimant, "later"}
            assert len(relay.choosing) == 1
            relay.choosing.abandon("latest")  # type: ignore[arg-type]


def test_what_follows_a_request_is_left_to_its_owner(relay: Relay) -> None:
    with relay.connect() as kubelet:
        kubelet.sendall(REQUEST)
        chosen = relay.poll_until_chosen()
        kubelet.sendall(b"more")
        relay.poller.poll(0)
        assert relay.chosen == [chosen]
        assert chosen.kubelet.recv(100) == b"more"


@pytest.mark.parametrize("is_reset", [False, True])
def test_connection_that_ends_without_a_request_is_closed(relay: Relay, is_reset: bool) -> None:
    with relay.connect() as kubelet:
        if is_reset:
            kubelet.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    relay.poller.poll(30)
    assert len(relay.choosing) == 0
    assert relay.chosen == []
    assert relay.accepted[0].fileno() == -1


def test_connections_of_a_removed_target_are_reset(relay: Relay) -> None:
    claimant: Any = "other"
    with relay.connect() as kubelet, relay.connect(claimant) as other:
        descriptors = [accepted.fileno() for accepted in relay.accepted]
        relay.choosing.abandon(relay.claimant)
        assert [*map(relay.poller.is_registered, descriptors)] == [False, True]
        with pytest.raises(ConnectionResetError):
            kubelet.recv(1)
        assert len(relay.choosing) == 1
        other.sendall(REQUEST)
        assert relay.poll_until_chosen().claimant is claimant
    assert len(relay.choosing) == 0
