"""A proxied connection of a local API: backpressure both ways, its end, and the requests in it."""

import asyncio
from typing import cast

import pytest

from agent.api.paced_user import PacedUser
from agent.api.proxied_connection import ProxiedConnection, RequestCounter


class Peer(asyncio.Transport):
    """One side's transport."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = True
        self.is_closed = False
        self.is_aborted = False
        self.written = b""

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True


class User:
    """The pace of a client's user, and what its connections sent and received."""

    def __init__(self) -> None:
        self.is_paused = False
        self.readers: set[object] = set()
        self.requests = self.octets_sent = self.octets_received = 0

    def sent(self, requests: int, octets: int) -> None:
        self.requests += requests
        self.octets_sent += octets

    def received(self, octets: int) -> None:
        self.octets_received += octets


class Pair:
    """A connection between two peers. Needs a running event loop."""

    def __init__(self) -> None:
        self.user = User()
        self.client, self.server = Peer(), Peer()
        self.proxied = ProxiedConnection(cast(PacedUser, self.user))

    async def open(self) -> None:
        self.proxied.client.connection_made(self.client)
        await asyncio.sleep(0)
        self.proxied.server.connection_made(self.server)

    def send(self, data: bytes) -> None:
        """As the client."""
        buffer = self.proxied.client.get_buffer(-1)
        buffer[: len(data)] = data
        self.proxied.client.buffer_updated(len(data))


@pytest.fixture
async def pair() -> Pair:
    made = Pair()
    await made.open()
    return made


async def test_client_is_read_once_the_server_is_connected() -> None:
    pair = Pair()
    pair.proxied.client.connection_made(pair.client)
    await asyncio.sleep(0)
    reads = [pair.client.is_read]
    pair.proxied.server.connection_made(pair.server)
    reads.append(pair.client.is_read)
    assert reads == [False, True]
    assert pair.user.readers == {pair.proxied.client}


async def test_octets_reach_the_other_side_and_are_counted(pair: Pair) -> None:
    pair.send(b"request")
    pair.proxied.server.data_received(b"response!")
    assert pair.server.written == b"request"
    assert pair.client.written == b"response!"
    assert (pair.user.octets_sent, pair.user.octets_received) == (7, 9)


async def test_side_whose_peer_does_not_read_pauses_the_other(pair: Pair) -> None:
    pair.proxied.client.pause_writing()
    assert (pair.client.is_read, pair.server.is_read) == (True, False)
    pair.proxied.client.resume_writing()
    assert pair.server.is_read
    pair.proxied.server.pause_writing()
    assert (pair.client.is_read, pair.server.is_read) == (False, True)
    pair.proxied.server.resume_writing()
    assert pair.client.is_read


async def test_client_of_a_user_beyond_its_pace_is_not_read(pair: Pair) -> None:
    pair.user.is_paused = True
    pair.proxied.client.update_reading()
    pair.proxied.server.update_reading()
    assert (pair.client.is_read, pair.server.is_read) == (False, True)
    pair.proxied.server.resume_writing()
    assert not pair.client.is_read
    pair.user.is_paused = False
    pair.proxied.client.update_reading()
    assert pair.client.is_read


@pytest.mark.parametrize("first", ["client", "server"])
async def test_end_of_one_side_closes_the_other(pair: Pair, first: str) -> None:
    sides = [pair.proxied.client, pair.proxied.server]
    peers = [pair.client, pair.server]
    if first == "server":
        sides.reverse()
        peers.reverse()
    sides[0].connection_lost(None)
    assert peers[1].is_closed
    assert not pair.proxied.closed.is_set()
    sides[1].connection_lost(None)
    assert pair.proxied.closed.is_set()
    assert not pair.user.readers


async def test_server_that_connects_after_the_clients_end_is_aborted() -> None:
    pair = Pair()
    pair.proxied.client.connection_made(pair.client)
    pair.proxied.client.connection_lost(None)
    pair.proxied.server.connection_made(pair.server)
    assert pair.server.is_aborted


async def test_abort_closes_what_is_open_at_once(pair: Pair) -> None:
    pair.proxied.client.connection_lost(None)
    pair.proxied.abort()
    assert (pair.client.is_aborted, pair.server.is_aborted) == (False, True)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, length: int) -> bytes:
    return length.to_bytes(3) + bytes([kind, 0, 0, 0, 0, 1]) + bytes(length)


@pytest.mark.parametrize("size", [1, 2, 9, 10, 1000])
def test_requests_are_counted_however_their_octets_are_cut(size: int) -> None:
    settings, headers, data = frame(4, 6), frame(1, 30), frame(0, 12)
    sent = PREFACE + settings + headers + data + frame(0, 0) + headers
    counter = RequestCounter()
    parts = [sent[start : start + size] for start in range(0, len(sent), size)]
    assert sum(map(counter.feed, parts)) == 2
