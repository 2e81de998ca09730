"""HTTP within limits: one `serve` under every HTTP server, over TCP, TLS and unix sockets."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

from agent.http_library import web
from agent.serving.acceptor import Acceptor
from agent.serving.connection_tasks import ConnectionTasks
from agent.serving.places import Limits, Place, Places

_SHUTDOWN_SECONDS = 1.0

BODY = web.RequestKey("body", bytes)
"""The request's body, which is complete before its handler runs."""
_CONNECTION = web.RequestKey("connection", object)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Tls = Callable[[], ssl.SSLContext]
"""The context for new connections."""


def places(limits: Limits) -> Places:
    """Of one server."""
    return Places(
        limits.connections, trusted=limits.trusted_connections, of_peer=limits.peer_connections
    )


def trust(request: web.Request) -> None:
    """The client has proved that it may use the server, so a share of the places is kept for it."""
    connection = request[_CONNECTION]
    assert isinstance(connection, _Connection)
    connection.place.trust()


@contextlib.asynccontextmanager
async def serve(
    app: web.Application,
    sockets: Sequence[socket.socket],
    limits: Limits,
    *,
    tls: Tls | None = None,
) -> AsyncIterator[Places]:
    """Serve on listening sockets while inside, which the caller closes.

    The application is served once. Its handlers find the body in `request[BODY]`.
    """
    server = _Server(limits, tls)
    app.middlewares.append(server.handle)
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        keepalive_timeout=limits.silent_seconds,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        with server.accepting(runner.server, sockets):
            yield server.places
    finally:
        # Responses that are under way have their time.
        await runner.cleanup()
        await server.close()


class _Connection(asyncio.Protocol):
    """aiohttp's handler of one connection, which ends at its time limit."""

    def __init__(self, handler: web.RequestHandler, place: Place) -> None:
        self.place = place
        self.closed = asyncio.Event()
        self.body_bytes = 0
        """Received of a body that is not complete."""
        self._handler = handler
        self._transport: asyncio.BaseTransport | None = None
        self._end: asyncio.TimerHandle | None = None

    def limit(self, seconds: float) -> None:
        """Close the connection after this time, instead of an earlier limit."""
        if self._end:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(seconds, self.abort)

    def abort(self) -> None:
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._end:
            self._end.cancel()
        self._handler.connection_lost(exc)
        self.closed.set()


class _Server:
    """One application's connections."""

    def __init__(self, limits: Limits, tls: Tls | None) -> None:
        self.places = places(limits)
        self._limits = limits
        self._tls = tls
        self._connections: dict[web.RequestHandler, _Connection] = {}
        self._tasks = ConnectionTasks()

    @contextlib.contextmanager
    def accepting(self, made: web.Server, sockets: Sequence[socket.socket]) -> Iterator[None]:
        """Accept connections while inside. made: makes aiohttp's handlers."""

        def handle(accepted: socket.socket, place: Place) -> None:
            serving = self._serve(made(), accepted, place)
            self._tasks.start(serving, accepted, place, name="http connection")

        acceptor = Acceptor(self.places, handle)
        with contextlib.ExitStack() as stack:
            for listening in sockets:
                stack.enter_context(acceptor.accepting(listening))
            yield

    async def close(self) -> None:
        """Close all connections."""
        await self._tasks.close()

    async def _serve(
        self, handler: web.RequestHandler, accepted: socket.socket, place: Place
    ) -> None:
        """One connection, to its end."""
        loop = asyncio.get_running_loop()
        connection = _Connection(handler, place)
        self._connections[handler] = connection
        try:
            tls = self._tls() if self._tls else None
            with contextlib.suppress(OSError):
                async with asyncio.timeout(self._limits.silent_seconds):
                    await loop.connect_accepted_socket(lambda: connection, accepted, ssl=tls)
                connection.limit(self._limits.silent_seconds)
                await connection.closed.wait()
        finally:
            connection.abort()
            self._connections.pop(handler, None)

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Receive the whole request, then respond, each in its time."""
        connection = self._connections.get(request.protocol)
        if connection is None:  # it is closed
            raise web.HTTPServiceUnavailable
        request[_CONNECTION] = connection
        try:
            # The rest of the time for silence, which started with the connection.
            request[BODY] = await self._body(request, connection)
        finally:
            connection.body_bytes = 0
        connection.place.set_silent(False)
        connection.limit(self._limits.answer_seconds)
        response = await handler(request)
        if self._limits.is_kept:
            # The rest is written at once: such responses fit into the socket's buffer.
            connection.place.set_silent(True)
        else:
            response.force_close()
        return response

    async def _body(self, request: web.Request, connection: _Connection) -> bytes:
        """Raises `HTTPRequestEntityTooLarge`."""
        most = self._limits.body_bytes
        if (length := request.content_length) and length > most:
            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=length)
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            connection.body_bytes = len(body)
            if len(body) > most:
                raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(body))
            self._limit_bodies()
        return bytes(body)

    def _limit_bodies(self) -> None:
        """Close the connection with the largest body where all together are too large."""
        connections = self._connections.values()
        if sum(found.body_bytes for found in connections) > self._limits.bodies_bytes:
            max(connections, key=lambda found: found.body_bytes).abort()
