"""Accepts connections of listening sockets, each with a place of its client."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

from agent.backoff import Bucket
from agent.serving import peers
from agent.serving.places import Place, Places

# In one iteration of the event loop.
_ACCEPTS_AT_ONCE = 64
# A connection that is closed at once costs 20 us. Beyond this nothing is accepted for a moment,
# from no client: the kernel does not report who waits to be accepted.
_REJECTIONS_PER_SECOND = 1000.0
_REJECTIONS_BURST = 1000
# Also while no file descriptor is left, and no memory.
_ACCEPT_AGAIN_SECONDS = 0.1

Handle = Callable[[socket.socket, Place], None]
"""Serves a connection from now on, and in the end closes the socket and releases the place."""


class Acceptor:
    """Accepts for one server."""

    def __init__(self, places: Places, handle: Handle) -> None:
        self._places = places
        self._handle = handle
        self._rejections = Bucket(per_second=_REJECTIONS_PER_SECOND, burst=_REJECTIONS_BURST)

    @contextlib.contextmanager
    def accepting(self, listening: socket.socket) -> Iterator[None]:
        """Accept connections of a listening socket while inside."""
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        again: asyncio.TimerHandle | None = None

        def start() -> None:
            loop.add_reader(listening, accept)

        def accept() -> None:
            nonlocal again
            for _ in range(_ACCEPTS_AT_ONCE):
                try:
                    accepted, _ = listening.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    return
                except OSError:
                    break
                if not self._admit(accepted):
                    break
            else:
                return
            loop.remove_reader(listening)
            again = loop.call_later(_ACCEPT_AGAIN_SECONDS, start)

        start()
        try:
            yield
        finally:
            loop.remove_reader(listening)
            if again:
                again.cancel()

    def _admit(self, accepted: socket.socket) -> bool:
        """Whether more may be accepted now."""
        before = self._places.rejected
        accepted.setblocking(False)
        place = self._places.take(peers.of(accepted))
        if place is None:
            accepted.close()
        else:
            self._handle(accepted, place)
        for _ in range(self._places.rejected - before):
            self._rejections.take()
        return self._rejections.seconds_until_next() == 0
