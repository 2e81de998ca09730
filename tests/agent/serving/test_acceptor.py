"""Which connections are accepted, and when no further ones are for a moment."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence

import pytest

from agent.serving import acceptor, peers
from agent.serving.acceptor import Acceptor
from agent.serving.places import Peer, Place, Places
from tests import polling


class Listening(socket.socket):
    """Fails to accept as often as it is given errors."""

    errors: Sequence[OSError] = ()

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            first, *self.errors = self.errors
            raise first
        return super().accept()


@pytest.fixture
def listening() -> Iterator[Listening]:
    with Listening(socket.AF_INET, socket.SOCK_STREAM) as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made


class Server:
    """Has places for this number of connections of a client; holds what it accepts."""

    def __init__(self, of_peer: int = 1000) -> None:
        self.places = Places(1000, trusted=0, of_peer=of_peer)
        self.acceptor = Acceptor(self.places, self._handle)
        self.held: list[tuple[socket.socket, Place]] = []

    def _handle(self, accepted: socket.socket, place: Place) -> None:
        place.set_silent(False)
        self.held.append((accepted, place))

    def close(self) -> None:
        for accepted, _ in self.held:
            accepted.close()


@contextlib.contextmanager
def clients(listening: socket.socket, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        address = listening.getsockname()
        made = [stack.enter_context(socket.create_connection(address)) for _ in range(count)]
        for one in made:
            one.setblocking(False)
        yield made


def is_closed(client: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return client.recv(1) == b""
    return False


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def peer(monkeypatch: pytest.MonkeyPatch) -> Peer:
    """All connections are of one user."""
    one = Peer("user 1")
    monkeypatch.setattr(peers, "of", lambda accepted: one)
    return one


async def test_each_connection_is_served_with_a_place_of_its_client(
    listening: Listening, peer: Peer
) -> None:
    server = Server()
    with clients(listening, 3):
        with server.acceptor.accepting(listening):
            await polling.until("all connections", lambda: len(server.held) == 3)
        assert [place.peer for _, place in server.held] == [peer] * 3
        assert not any(accepted.getblocking() for accepted, _ in server.held)
    assert (server.places.open, server.places.rejected) == (3, 0)
    with clients(listening, 1):
        await turns()
        assert len(server.held) == 3
    server.close()


async def test_connection_without_a_place_is_closed_and_others_are_accepted(
    listening: Listening,
) -> None:
    server = Server(of_peer=1)
    with server.acceptor.accepting(listening), clients(listening, 3) as made:
        await polling.until("two are closed", lambda: sum(map(is_closed, made)) == 2)
        assert [is_closed(one) for one in made] == [False, True, True]
        server.held[0][1].release()
        with clients(listening, 1):
            await polling.until("the next one", lambda: len(server.held) == 2)
    assert (server.places.open, server.places.rejected) == (1, 2)
    server.close()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR, errno.ECONNABORTED])
async def test_connection_that_is_gone_delays_no_other(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(acceptor, "_ACCEPT_AGAIN_SECONDS", 3600.0)
    listening.errors = [OSError(number, "")]
    server = Server()
    with clients(listening, 1), server.acceptor.accepting(listening):
        await polling.until("the connection", lambda: len(server.held) == 1)
    server.close()


async def test_nothing_is_accepted_for_a_moment_without_a_free_descriptor(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    shortage = OSError(errno.EMFILE, "")
    with clients(listening, 1):
        monkeypatch.setattr(acceptor, "_ACCEPT_AGAIN_SECONDS", 3600.0)
        listening.errors = [shortage]
        with server.acceptor.accepting(listening):
            await turns()
            assert not listening.errors
            assert not server.held
        monkeypatch.setattr(acceptor, "_ACCEPT_AGAIN_SECONDS", 0.0)
        listening.errors = [shortage, shortage]
        with server.acceptor.accepting(listening):
            await polling.until("the connection", lambda: len(server.held) == 1)
    server.close()


async def test_nothing_is_accepted_for_a_moment_after_many_rejections(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "_ACCEPT_AGAIN_SECONDS", 3600.0)
    monkeypatch.setattr(acceptor, "_REJECTIONS_PER_SECOND", 0.001)
    monkeypatch.setattr(acceptor, "_REJECTIONS_BURST", 2)
    server = Server(of_peer=1)
    with clients(listening, 6) as made, server.acceptor.accepting(listening):
        await turns()
        assert (len(server.held), server.places.rejected) == (1, 2)
        assert [is_closed(one) for one in made] == [False, True, True, False, False, False]
    server.close()


async def test_many_connections_are_accepted_in_several_turns(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "_ACCEPTS_AT_ONCE", 2)
    monkeypatch.setattr(acceptor, "_ACCEPT_AGAIN_SECONDS", 3600.0)
    server = Server()
    counts: list[int] = []
    with clients(listening, 5), server.acceptor.accepting(listening):
        while len(server.held) < 5 and len(counts) < 100:
            await asyncio.sleep(0)
            counts.append(len(server.held))
    assert [count for count in (2, 4, 5) if count in counts] == [2, 4, 5]
    assert not {1, 3} & set(counts)
    server.close()
