"""Serves the book to anyone on the node, over a unix socket, and over the loopback if asked.

Nobody is trusted: requests are small, and of each user of the node only so many may wait, and only
so many states are told without waiting. Connections come through `agent/api/peer_credentials.py`,
which knows whose they are. All who come over the loopback are one user.
"""

import asyncio
import collections
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from agent import backoff
from agent.api.peer_credentials import DoorError, Doorway
from agent.api.services.publisher import Book
from agent.client import endpoints_pb2 as pb

log = structlog.get_logger(__name__)

SERVICE: Final = "podgate.localnet.v1alpha1.Endpoints"

_MOST_REQUEST_BYTES: Final = 16 << 10
_MOST_CALLS: Final = 4096
_CALLS_EACH: Final = 1000
"""Of one user at a time; so several can have theirs."""
# Of users that asked once; the one that asked longest ago is forgotten first, and starts anew.
_MOST_USERS: Final = 1024
# A whole state of a big cluster is some 10 ms of the agent's time. Who has the newest one and waits
# is told of the next as soon as it is there; who need not wait takes one of these, of each user's.
# After a restart all readers come at once.
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
        """at_once_burst: how many answers that he need not wait for a user is given in a row."""
        self._book = book
        self._at_once_burst = at_once_burst
        self._at_once: collections.OrderedDict[int, backoff.Bucket] = collections.OrderedDict()
        self._calls: collections.Counter[int] = collections.Counter()
        self._health = health.aio.HealthServicer()

    @contextlib.asynccontextmanager
    async def serving(
        self, socket: pathlib.Path, inner: pathlib.Path, address: tuple[str, int] | None = None
    ) -> AsyncIterator[int]:
        """Serve while entered; gives the port on the loopback, 0 without `address`.

        inner: gRPC's own socket, in a directory for root only; address: host and port of the
        loopback; port 0 takes a free one. Raises `ListenError`.
        """
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MOST_CALLS)
        doorway = Doorway(socket, inner)
        server.add_generic_rpc_handlers((self._handler(doorway),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
        port = _bind(server, inner, address)
        await server.start()
        watching = asyncio.create_task(self._follow_health(), name="health of service endpoints")
        try:
            async with _standing(doorway):
                log.info("service endpoints are served", socket=str(socket), port=port or None)
                yield port
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await server.stop(grace=None)

    def _handler(self, doorway: Doorway) -> Any:
        async def answer(request: bytes, context: Any) -> None:
            user = doorway.user_of(context.peer())
            if self._calls[user] >= _CALLS_EACH:
                await _refuse(context, "this user has too many calls open")
            self._calls[user] += 1
            try:
                await self._next(request, context, user)
            finally:
                self._calls[user] -= 1
                if not self._calls[user]:
                    del self._calls[user]

        # Bytes both ways: a request that cannot be read gets a status of ours, and answers are
        # encoded already.
        next_handler = grpc.unary_stream_rpc_method_handler(answer)
        return grpc.method_handlers_generic_handler(SERVICE, {"Next": next_handler})

    async def _next(self, request: bytes, context: Any, user: int) -> None:
        try:
            known = pb.NextFilter.FromString(request)
        except DecodeError:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the request is no {SERVICE.rpartition('.')[0]}.NextFilter",
            )
        if self._book.is_newer(known.instance_id, known.rev):
            bucket = self._bucket(user)
            if bucket.seconds_until_next() > 0:
                await _refuse(
                    context,
                    "this user asks for too many states; send the instance_id and rev of the last "
                    "header, or come later",
                )
            bucket.take()
        found = await self._book.newer(known.instance_id, known.rev)
        # Who reads slowly holds up nobody, and finds the newest when he asks again. What he holds
        # is shared with other revisions but for what has changed.
        for message in found.messages():
            await context.write(message)

    def _bucket(self, user: int) -> backoff.Bucket:
        found = self._at_once.pop(user, None) or backoff.Bucket(
            per_second=_AT_ONCE_PER_SECOND, burst=self._at_once_burst
        )
        self._at_once[user] = found
        if len(self._at_once) > _MOST_USERS:
            self._at_once.popitem(last=False)
        return found

    async def _follow_health(self) -> None:
        """What is asked for before the first whole state waits, and health says so."""
        await self._book.newer(0, 0)
        await self._say(health_pb2.HealthCheckResponse.SERVING)

    async def _say(self, status: Any) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)


async def _refuse(context: Any, message: str) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def _bind(server: grpc.aio.Server, inner: pathlib.Path, address: tuple[str, int] | None) -> int:
    try:
        inner.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        inner.parent.chmod(0o700)
        inner.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{inner}")
        if address is None:
            return 0
        host, port = address
        bound: int = server.add_insecure_port(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        )
    except (OSError, RuntimeError) as error:
        raise ListenError(
            f"service endpoints cannot be served ({error}); choose another --run-directory or "
            "--localnet-address"
        ) from error
    return bound


@contextlib.asynccontextmanager
async def _standing(doorway: Doorway) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(doorway.standing())
        except DoorError as error:
            raise ListenError(str(error)) from error
        yield
