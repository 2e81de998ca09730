"""Serves the book to anyone on the node, over a unix socket, and over the loopback if asked.

Who may connect is said by the socket's path and mode alone. So nobody is trusted: requests are
small, their number is bounded, and whoever asks in a loop is refused.
"""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from agent.kube import pacing
from agent.localnet import endpoints_pb2 as pb
from agent.localnet.book import Book

log = structlog.get_logger(__name__)

SERVICE: Final = "podgate.localnet.v1alpha1.Endpoints"

_SOCKET_MODE: Final = 0o666
_DIRECTORY_MODE: Final = 0o755
# sun_path of unix(7).
_MOST_PATH_BYTES: Final = 107
_MOST_REQUEST_BYTES: Final = 16 << 10
_MOST_CALLS: Final = 1024
# A whole state of a big cluster is some 10 ms of the agent's time. Who has the newest one and waits
# is told of the next as soon as it is there; who need not wait takes one of these. After a restart
# all readers come at once.
_AT_ONCE_PER_SECOND: Final = 20.0
_AT_ONCE_BURST: Final = 200

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MOST_REQUEST_BYTES),
    ("grpc.max_concurrent_streams", 100),
    # Who connects and says nothing, or nothing any more, has no need of a connection.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.so_reuseport", 0),
)


class ListenError(Exception):
    """The socket cannot be had; the message says why."""


class Server:
    """One server for one book."""

    def __init__(self, book: Book, *, at_once_burst: int = _AT_ONCE_BURST) -> None:
        """at_once_burst: how many answers that nobody had to wait for are given in a row."""
        self._book = book
        self._at_once = pacing.Bucket(per_second=_AT_ONCE_PER_SECOND, burst=at_once_burst)
        self._health = health.aio.HealthServicer()

    @contextlib.asynccontextmanager
    async def serving(
        self, socket: pathlib.Path, address: tuple[str, int] | None = None
    ) -> AsyncIterator[int]:
        """Serve while entered; gives the port on the loopback, 0 without `address`.

        address: host and port of the loopback; port 0 takes a free one. Raises `ListenError`.
        """
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MOST_CALLS)
        server.add_generic_rpc_handlers((self._handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
        _make_place(socket)
        port = 0
        try:
            server.add_insecure_port(f"unix:{socket}")
            if address is not None:
                host, number = address
                port = server.add_insecure_port(
                    f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
                )
        except RuntimeError as error:
            raise ListenError(f"the service endpoints cannot be served: {error}") from error
        await server.start()
        watching = asyncio.create_task(self._follow_health(), name="health of service endpoints")
        try:
            _open(socket)
            log.info("service endpoints are served", socket=str(socket), port=port or None)
            yield port
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await server.stop(grace=None)

    def _handler(self) -> Any:
        # Bytes both ways: a request that cannot be read gets a status of ours, and answers are
        # encoded already.
        next_handler = grpc.unary_stream_rpc_method_handler(self._next)
        return grpc.method_handlers_generic_handler(SERVICE, {"Next": next_handler})

    async def _next(self, request: bytes, context: Any) -> None:
        try:
            known = pb.NextFilter.FromString(request)
        except DecodeError:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the request is no {SERVICE.rpartition('.')[0]}.NextFilter",
            )
        if self._book.is_newer(known.instance_id, known.rev):
            if self._at_once.seconds_until_next() > 0:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "too many states are asked for; send the instance_id and rev of the last "
                    "header, or come later",
                )
            self._at_once.take()
        found = await self._book.newer(known.instance_id, known.rev)
        # Who reads slowly holds up nobody, and finds the newest when he asks again. What he holds
        # is shared with other revisions but for what has changed.
        for message in found.messages():
            await context.write(message)

    async def _follow_health(self) -> None:
        """What is asked for before the first whole state waits, and health says so."""
        await self._book.newer(0, 0)
        await self._say(health_pb2.HealthCheckResponse.SERVING)

    async def _say(self, status: Any) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)


def _make_place(socket: pathlib.Path) -> None:
    """A directory of its own, since clients mount directories."""
    if len(bytes(socket)) > _MOST_PATH_BYTES:
        raise ListenError(
            f"{socket} is too long for a socket ({_MOST_PATH_BYTES} bytes at most); choose another "
            "--run-directory"
        )
    try:
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.parent.chmod(_DIRECTORY_MODE)
        socket.unlink(missing_ok=True)
    except OSError as error:
        raise ListenError(
            f"{socket} cannot be made ({error.strerror}); choose another --run-directory"
        ) from error


def _open(socket: pathlib.Path) -> None:
    # Who may connect is who may write to it.
    socket.chmod(_SOCKET_MODE)
