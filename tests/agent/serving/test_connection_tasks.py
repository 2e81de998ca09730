"""A connection has its socket and its place until the task that serves it ends."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from agent.serving.connection_tasks import ConnectionTasks
from agent.serving.places import Peer, Place, Places

PEER = Peer("user 1")


class Connections:
    """Tasks of a server with three places, and the sockets that they were started with."""

    def __init__(self) -> None:
        self.tasks = ConnectionTasks()
        self.places = Places(3, trusted=0, of_peer=3, now=lambda: 0.0)
        self.sockets: list[socket.socket] = []

    def start(self, seconds: float = 3600.0) -> tuple[asyncio.Task[None], Place]:
        place = self.places.take(PEER)
        assert place is not None
        self.sockets.append(socket.socket())
        task = self.tasks.start(_served(seconds), self.sockets[-1], place, name="one")
        return task, place

    @property
    def are_open(self) -> list[bool]:
        return [found.fileno() >= 0 for found in self.sockets]


async def _served(seconds: float) -> None:
    await asyncio.sleep(seconds)


@pytest.fixture
def connections() -> Iterator[Connections]:
    made = Connections()
    yield made
    for found in made.sockets:
        found.close()


async def test_connection_that_was_served_is_closed_and_its_place_is_free(
    connections: Connections,
) -> None:
    task, _ = connections.start(0.0)
    connections.start()
    assert task.get_name() == "one"
    await task
    await asyncio.sleep(0)
    assert (connections.are_open, connections.places.open) == ([False, True], 1)
    await connections.tasks.close()


async def test_connection_that_loses_its_place_ends(connections: Connections) -> None:
    first, _ = connections.start()
    connections.start()
    connections.start()
    # The oldest silent one makes room for another.
    assert connections.places.take(PEER) is not None
    await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled()
    assert (connections.are_open, connections.places.open) == ([False, True, True], 3)
    await connections.tasks.close()


async def test_all_connections_end_with_the_server(connections: Connections) -> None:
    tasks = [connections.start()[0] for _ in range(2)]
    await connections.tasks.close()
    assert [task.cancelled() for task in tasks] == [True, True]
    assert (connections.are_open, connections.places.open) == ([False, False], 0)
    await connections.tasks.close()
