"""Serves service endpoints to other nodes, over TCP with mutual TLS: as any node uses them.

Clients have a certificate of the configured authority. All of them are trusted with all services,
as agents are that read the API server; limits for each address protect the server from mistakes.
Any other client may connect to the port, so half of the places are for clients that had a
certificate lately.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import pathlib
import socket
from collections.abc import AsyncIterator
from typing import NoReturn

import grpc
import structlog

from agent.api import listen
from agent.api.forwarding import DESCRIPTORS_PER_CONNECTION, Forwarder
from agent.api.proxied_connection import ProxiedConnection
from agent.api.server import RequestContext
from agent.api.tls import CurrentTls
from agent.logs import Event
from agent.services.api.next_method import SERVICE, NextMethod
from agent.services.api.publisher import ServicePublisher
from agent.serving import descriptors
from agent.serving.acceptor import Acceptor
from agent.serving.connection_tasks import ConnectionTasks
from agent.serving.places import Place, Places
from agent.serving.ports import ListenError, Port

log = structlog.get_logger(__name__)

_MAX_CALLS = 10_000
_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 10),
    ("grpc.max_concurrent_streams", 1000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Clients find out by pings that this machine has failed.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # So does this server about clients.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Certificates are checked when a connection is made. Calls are shorter than the grace period.
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 700_000),
)
_STOP_SECONDS = 0.5
# A node has one, and a second one while its agent hands over; several may be behind one address.
_CONNECTIONS_OF_ADDRESS = 256
# For everything else of the process.
_RESERVED_DESCRIPTORS = 512
_BACKLOG = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class _Client:
    """Of one connection."""

    address: int
    place: Place


class NodesServer:
    """Serves the snapshots of a publisher to other nodes."""

    def __init__(
        self,
        publisher: ServicePublisher,
        address: tuple[str, int],
        tls: CurrentTls,
        *,
        inner: pathlib.Path,
        connections: int = _MAX_CALLS,
        connections_of_address: int = _CONNECTIONS_OF_ADDRESS,
        **limits: int,
    ) -> None:
        """
        :param address: host and port, 0 for a free one.
        :param inner: gRPC's own socket, in a directory for itself.
        :param connections: the maximum; fewer where the process may open few files.
        :param connections_of_address: the maximum of one client.
        :param limits: as of `NextMethod`, of each address.
        """
        self._host = address[0]
        self._port = Port(address, "--services-listen")
        self._tls = tls
        self._inner = inner
        self.is_serving = False
        fitting = (descriptors.raise_limit() - _RESERVED_DESCRIPTORS) // DESCRIPTORS_PER_CONNECTION
        connections = max(1, min(connections, fitting))
        self._places = Places(
            connections,
            trusted=connections // 2,
            of_peer=connections_of_address,
            max_trusted=connections,
        )
        self._forwarder: Forwarder[_Client] = Forwarder(inner)
        self._tasks = ConnectionTasks()
        self._next = NextMethod(publisher, user_of=self._address_of, reject=_reject, **limits)

    @property
    def calls(self) -> int:
        """Open now: about one for each connected node."""
        return self._next.calls

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        """Serve while inside; yields the port. Raises `ListenError`, also without certificates."""
        await asyncio.to_thread(self._tls.refresh)
        if self._tls.content is None:
            raise ListenError(self._tls.problem)
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
        handlers = {"Next": grpc.unary_stream_rpc_method_handler(self._next.handle)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        listen.add_grpc_socket(server, self._inner, self._tls.server_credentials())
        await server.start()
        try:
            async with self._accepting():
                self.is_serving = True
                port = int(self._port.sockets[0].getsockname()[1])
                log.info(Event.SERVICES_LISTENING, host=self._host, port=port)
                yield port
        finally:
            self.is_serving = False
            await server.stop(_STOP_SECONDS)

    async def run(self) -> None:
        """Serve until cancelled. Raises `ListenError`."""
        async with self.serve():
            await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def _accepting(self) -> AsyncIterator[None]:
        """Forward connections to gRPC while inside. Raises `ListenError`."""
        await self._port.open()
        with contextlib.closing(self._port):
            acceptor = Acceptor(self._places, self._handle)
            try:
                with contextlib.ExitStack() as accepting:
                    for listening in self._port.sockets:
                        listening.listen(_BACKLOG)
                        accepting.enter_context(acceptor.accepting(listening))
                    yield
            finally:
                await self._tasks.close()

    def _handle(self, accepted: socket.socket, place: Place) -> None:
        try:
            address = ipaddress.ip_address(accepted.getpeername()[0].partition("%")[0])
        except OSError:  # it is closed already
            accepted.close()
            place.release()
            return
        client = _Client(int(address), place)
        forwarding = self._forwarder.forward(accepted, ProxiedConnection(None), client)
        self._tasks.start(forwarding, accepted, place, name=f"connection of {address}")

    def _address_of(self, context: RequestContext) -> int:
        """The client's address as a number. It has a certificate, since it calls."""
        client = self._forwarder.client_of(context.peer())
        if client is None:  # its connection has just closed
            return 0
        client.place.trust()
        client.place.set_silent(False)
        return client.address


async def _reject(context: RequestContext, limit: str, message: str) -> NoReturn:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
