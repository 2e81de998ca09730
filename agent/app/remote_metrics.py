"""Metrics for Prometheus on other machines: over TLS, to clients that the API server authorizes.

Anyone may connect to the node's address, so what a client can hold is limited: connections of all
and of each address, and the time of each. Each connection serves one request.
"""

import asyncio
import collections
import contextlib
import datetime
import os
import pathlib
import socket
import ssl
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from agent import tasks
from agent.admin import endpoints
from agent.admin.endpoints import Observable
from agent.kube import self_signed
from agent.kube.client import ApiClient
from agent.kube.token_reviews import Access, TokenReviews
from agent.logs import Event
from agent.operate.page.server import StatusPage

log = structlog.get_logger(__name__)

_PATH = "/metrics"

_MAX_CONNECTIONS = 64
_MAX_OF_ADDRESS = 16
_HANDSHAKE_SECONDS = 5.0
# Prometheus' own limit of a scrape is 10 s by default.
_CONNECTION_SECONDS = 30.0
# Descriptors may be short for a moment.
_PAUSE_SECONDS = 1.0

# A Secret's files are replaced at once, and cert-manager renews a third of the lifetime before.
_RELOAD_SECONDS = 60.0
# No client trusts it, so its end only has to be after the process'.
_LIFETIME = datetime.timedelta(days=3650)

_REJECTIONS = {
    Access.UNAUTHENTICATED: (401, "send a bearer token of this cluster"),
    Access.FORBIDDEN: (403, "this token's user may not get the non-resource URL /metrics"),
    Access.LIMITED: (429, "too many tokens were sent that are not known yet"),
    Access.UNAVAILABLE: (503, "the API server does not confirm the token at present"),
}


class RemoteMetrics:
    """Serves them on listening sockets while `run` runs."""

    def __init__(
        self,
        served: Observable,
        api: ApiClient,
        sockets: tuple[socket.socket, ...],
        certificate: tuple[pathlib.Path, pathlib.Path] | None,
        *,
        page: StatusPage | None = None,
    ) -> None:
        """sockets: listening, closed by the caller; certificate: files of the chain and its key,
        None for one that only encrypts; page: names are for the same clients."""
        self._served = served
        self._reviews = TokenReviews(api, path=_PATH)
        self._sockets = sockets
        self._files = certificate
        self._page = page
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._loaded: object = None
        self._problem = ""
        self._connections = collections.Counter[str]()

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._wait_for_certificate()
        app = endpoints.application(self._served, reject=self._reject, shows_reasons=False)
        if self._page:
            self._page.add_to(app, reject=self._reject)
        app.middlewares.append(_close_after)
        async with endpoints.runner_of(app) as runner, asyncio.TaskGroup() as group:
            assert runner.server is not None
            for listening in self._sockets:
                acceptor = _Acceptor(listening, runner.server, lambda: self._tls, self._connections)
                tasks.start(group, "metrics for other machines", acceptor.run)
            while True:
                await asyncio.sleep(_RELOAD_SECONDS)
                await asyncio.to_thread(self._load)

    async def _wait_for_certificate(self) -> None:
        while True:
            if await asyncio.to_thread(self._load):
                return
            await asyncio.sleep(_RELOAD_SECONDS)

    async def _reject(self, request: web.Request) -> web.Response | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        access = Access.UNAUTHENTICATED
        if scheme.lower() == "bearer":
            access = await self._reviews.access(token.strip(), request.remote or "")
        if access is Access.ALLOWED:
            return None
        status, text = _REJECTIONS[access]
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return web.Response(status=status, text=f"{text}\n", headers=headers)

    def _load(self) -> bool:
        """Use the certificate's current files; whether there is a certificate.

        Connections of the event loop use the present context meanwhile: it is never changed.
        """
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if self._files is None:
                if self._loaded is None:
                    now = datetime.datetime.now(datetime.UTC)
                    own = self_signed.certificate("podgate", ["podgate"], now, _LIFETIME)
                    own.load(tls)
                    self._tls, self._loaded = tls, own
            elif (stamp := _stamp(*self._files)) != self._loaded:
                tls.load_cert_chain(*self._files)
                self._tls, self._loaded = tls, stamp
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            if str(error) != self._problem:
                log.error(Event.METRICS_CERTIFICATE_UNREADABLE, error=str(error))
            self._problem = str(error)
        else:
            self._problem = ""
        return self._loaded is not None


class _Acceptor:
    """Accepts connections of one socket, within the limits."""

    def __init__(
        self,
        listening: socket.socket,
        server: web.Server,
        tls: Callable[[], ssl.SSLContext],
        connections: collections.Counter[str],
    ) -> None:
        """tls: the current context; connections: by address, of all sockets."""
        self._listening = listening
        self._server = server
        self._tls = tls
        self._connections = connections

    async def run(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    accepted, peer = await loop.sock_accept(self._listening)
                except OSError:
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                address = str(peer[0])
                if (
                    self._connections.total() >= _MAX_CONNECTIONS
                    or self._connections[address] >= _MAX_OF_ADDRESS
                ):
                    accepted.close()
                    continue
                self._connections[address] += 1
                group.create_task(self._serve(accepted, address), name="metrics connection")

    async def _serve(self, accepted: socket.socket, address: str) -> None:
        connection = _Connection(self._server())
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECTION_SECONDS):
                    transport, _ = await loop.connect_accepted_socket(
                        lambda: connection,
                        accepted,
                        ssl=self._tls(),
                        ssl_handshake_timeout=_HANDSHAKE_SECONDS,
                    )
                    try:
                        await connection.closed.wait()
                    finally:
                        if not connection.closed.is_set():
                            transport.abort()
        finally:
            accepted.close()
            self._connections[address] -= 1
            if not self._connections[address]:
                del self._connections[address]


class _Connection(asyncio.Protocol):
    """aiohttp's handler of one connection, with an event for its end."""

    def __init__(self, handler: web.RequestHandler) -> None:
        self._handler = handler
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
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
        self._handler.connection_lost(exc)
        self.closed.set()


@web.middleware
async def _close_after(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Each connection serves one request: a client has no use for a longer one."""
    response = await handler(request)
    response.force_close()
    return response


def _stamp(*files: pathlib.Path) -> tuple[tuple[int, int], ...]:
    return tuple((found.st_mtime_ns, found.st_ino) for found in map(os.stat, files))
