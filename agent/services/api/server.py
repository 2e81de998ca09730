"""Serves service endpoints to all processes on the node, also on the loopback if configured."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import grpc
import structlog

from agent.api.server import LocalServer
from agent.logs import Event
from agent.services.api.next_method import SERVICE, NextMethod
from agent.services.api.publisher import ServicePublisher

log = structlog.get_logger(__name__)

_MAX_CALLS = 4096


class ServicesServer:
    """Serves the snapshots of a publisher."""

    def __init__(
        self,
        publisher: ServicePublisher,
        *,
        path: pathlib.Path,
        inner: pathlib.Path,
        address: tuple[str, int] | None = None,
        **limits: int,
    ) -> None:
        """inner: gRPC's own socket, in a directory that only root enters; address: host and port of
        the loopback, to serve there as well, port 0 for a free one; limits: as of `NextMethod`."""
        self._publisher = publisher
        self._address = address
        self._local = LocalServer(SERVICE, path=path, inner=inner, max_calls=_MAX_CALLS)
        self._next = NextMethod(
            publisher, user_of=self._local.user_of, reject=self._local.reject, **limits
        )

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        """Serve while inside; yields the port on the loopback, 0 without an address.

        Raises `ListenError`.
        """
        methods = {"Next": grpc.unary_stream_rpc_method_handler(self._next.handle)}
        is_ready, address = self._publisher.is_ready, self._address
        async with self._local.serve(methods, is_ready=is_ready, address=address) as port:
            log.info(Event.SERVICES_LISTENING, socket=str(self._local.path), port=port or None)
            yield port

    async def run(self) -> None:
        """Serve until cancelled. Raises `ListenError`."""
        async with self.serve():
            await asyncio.Event().wait()
