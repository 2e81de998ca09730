"""Tasks that serve accepted connections, each with its place until it ends."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

from agent.serving.places import Place


class ConnectionTasks:
    """Those of one server."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(
        self,
        serve: Coroutine[Any, Any, None],
        accepted: socket.socket,
        place: Place,
        *,
        name: str,
    ) -> asyncio.Task[None]:
        """Serve a connection. At its end the socket is closed and the place is released; a place
        that is lost ends it."""
        task = asyncio.create_task(serve, name=name)
        self._running.add(task)

        def close() -> None:
            task.cancel()

        def ended(_: object) -> None:
            # Also of a task that was cancelled before it ran.
            self._running.discard(task)
            accepted.close()
            place.release()

        place.close = close
        task.add_done_callback(ended)
        return task

    async def close(self) -> None:
        """End all connections."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
