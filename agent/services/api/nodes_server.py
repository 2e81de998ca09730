"""Serves service endpoints to other nodes, over TCP with mutual TLS: as any node uses them.

Clients have a certificate of the configured authority. All of them are trusted with all services,
as agents are that read the API server; limits for each address protect the server from mistakes.
"""

import asyncio
import contextlib
import ipaddress
import urllib.parse
from collections.abc import AsyncIterator
from typing import NoReturn

import grpc
import structlog

from agent.api import listen
from agent.api.server import RequestContext
from agent.api.tls import CurrentTls
from agent.logs import Event
from agent.services.api.next_method import SERVICE, NextMethod
from agent.services.api.publisher import ServicePublisher
from agent.serving.ports import ListenError

log = structlog.get_logger(__name__)

_MAX_CALLS = 10_000
_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 10),
    ("grpc.max_concurrent_streams", 1000),
    # Those of a handshake included: as many nodes as there may be calls.
    ("grpc.max_allowed_incoming_connections", _MAX_CALLS),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
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


class NodesServer:
    """Serves the snapshots of a publisher to other nodes."""

    def __init__(
        self,
        publisher: ServicePublisher,
        address: tuple[str, int],
        tls: CurrentTls,
        **limits: int,
    ) -> None:
        """address: host and port, 0 for a free one; limits: as of `NextMethod`, of each address."""
        self._address = address
        self._tls = tls
        self.is_serving = False
        self._next = NextMethod(publisher, user_of=_address_of, reject=_reject, **limits)

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
        credentials = self._tls.server_credentials()
        port = listen.add_grpc_tls_port(server, *self._address, credentials)
        await server.start()
        try:
            self.is_serving = True
            log.info(Event.SERVICES_LISTENING, host=self._address[0], port=port)
            yield port
        finally:
            self.is_serving = False
            await server.stop(_STOP_SECONDS)

    async def run(self) -> None:
        """Serve until cancelled. Raises `ListenError`."""
        async with self.serve():
            await asyncio.Event().wait()


def _address_of(context: RequestContext) -> int:
    """The client's address as a number; gRPC names it `ipv4:198.18.0.1:5` or `ipv6:%5B::1%5D:5`."""
    host, _, _ = urllib.parse.unquote(context.peer()).partition(":")[2].rpartition(":")
    return int(ipaddress.ip_address(host.strip("[]").partition("%")[0]))


async def _reject(context: RequestContext, limit: str, message: str) -> NoReturn:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
