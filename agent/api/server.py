"""A gRPC server for all processes on the node: health, reflection, and limits per user."""

import asyncio
import collections
import contextlib
import pathlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from agent.api import listen
from agent.api.forwarding import Forwarder
from agent.api.paced_user import Pace
from agent.api.peer_credentials import LocalClient, PeerCredentialProxy
from agent.api.proxied_connection import ProxiedConnection
from agent.api.rate_limits import UserSlots

_OPTIONS = (
    # Requests are an id and two numbers.
    ("grpc.max_receive_message_length", 16 << 10),
    ("grpc.max_concurrent_streams", 100),
    # A client that connects and sends nothing, or nothing any more, needs no connection.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.so_reuseport", 0),
)
# Of health and reflection, whose streams have no time limit.
_MAX_STREAMS_PER_USER = 100
_STOP_SECONDS = 0.5

RequestT = TypeVar("RequestT", bound=Message)
Methods = Mapping[str, grpc.RpcMethodHandler]
"""Handlers by method name. They decode requests with `decode`: grpcio would report a request that
cannot be decoded as an internal error."""


class RequestContext(Protocol):
    """The part of grpc.aio.ServicerContext that handlers use."""

    def peer(self) -> str: ...

    def code(self) -> Any: ...

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...

    async def write(self, message: bytes) -> None: ...


class LocalServer:
    """One gRPC service on a socket that every process of the node may open."""

    def __init__(
        self,
        service: str,
        *,
        path: pathlib.Path,
        inner: pathlib.Path,
        max_calls: int,
        connections: int = 3000,
        pace: Pace | None = None,
        has_processes: bool = False,
        listening: socket.socket | None = None,
    ) -> None:
        """service: its full name; path: the public socket; inner: gRPC's own, in a directory that
        only root enters; max_calls: open at once, health and reflection included; connections: of
        all users together; pace: of each user, beyond which its connections are not read;
        has_processes: whether `client_of` has the clients' processes; listening: at `path` already,
        closed by this."""
        self._service = service
        self.path = path
        self._inner = inner
        self._max_calls = max_calls
        self._proxy = PeerCredentialProxy(
            path,
            inner,
            connections=connections,
            pace=pace,
            has_processes=has_processes,
            listening=listening,
        )
        self._streams = UserSlots(_MAX_STREAMS_PER_USER)
        self._health = health.aio.HealthServicer()
        self._rejected = collections.Counter[str]()

    @property
    def connections(self) -> int:
        return self._proxy.open

    @property
    def pauses(self) -> int:
        """How often a user was beyond its pace."""
        return self._proxy.pauses

    @property
    def rejected(self) -> dict[str, int]:
        """Rejected connections and calls, by limit."""
        return {"connections": self._proxy.rejected, **self._rejected}

    def user_of(self, context: RequestContext) -> int:
        """The user id of the calling process; -1 if the kernel does not report it."""
        return self._proxy.user_of(context.peer())

    def client_of(self, context: RequestContext) -> LocalClient | None:
        """The client of a call, as the kernel reports it; None if it is not known."""
        return self._proxy.client_of(context.peer())

    async def reject(self, context: RequestContext, limit: str, message: str) -> NoReturn:
        """End a call beyond a limit."""
        self._rejected[limit] += 1
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)

    @contextlib.asynccontextmanager
    async def serve(
        self, methods: Methods, *, is_ready: asyncio.Event, address: tuple[str, int] | None = None
    ) -> AsyncIterator[int]:
        """Serve while inside; yields the port on the loopback, 0 without `address`.

        is_ready: health reports SERVING once it is set; address: host and port of the loopback, to
        serve there as well. Raises `ListenError`.
        """
        server = grpc.aio.server(
            interceptors=(_StreamLimiter(self._service, self._limit_streams),),
            options=_OPTIONS,
            maximum_concurrent_rpcs=self._max_calls,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(self._service, methods),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (self._service, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        listen.add_grpc_socket(server, self._inner)
        async with _running(server):
            following = asyncio.create_task(
                self._follow_readiness(is_ready), name=f"health of {self._service}"
            )
            try:
                async with self._proxy.serve(address) as port:
                    yield port
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _follow_readiness(self, is_ready: asyncio.Event) -> None:
        await is_ready.wait()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def _set_health(self, status: Any) -> None:
        for service in ("", self._service):
            await self._health.set(service, status)

    @contextlib.asynccontextmanager
    async def _limit_streams(self, context: RequestContext) -> AsyncIterator[None]:
        user = self.user_of(context)
        if not self._streams.has_room(user):
            await self.reject(context, "streams", "this user has too many streams open")
        with self._streams.hold(user):
            yield


class _StreamLimiter(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Limits the streams of health and reflection, which are not ours."""

    def __init__(
        self,
        service: str,
        limit: Callable[[RequestContext], contextlib.AbstractAsyncContextManager[None]],
    ) -> None:
        self._prefix = f"/{service}/"
        self._limit = limit

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not handler.response_streaming:
            return handler
        if details.method.startswith(self._prefix):
            return handler
        is_stream = handler.request_streaming
        behaviour = handler.stream_stream if is_stream else handler.unary_stream
        make = (
            grpc.stream_stream_rpc_method_handler
            if is_stream
            else grpc.unary_stream_rpc_method_handler
        )

        async def limited(request: Any, context: RequestContext) -> AsyncIterator[Any]:
            async with self._limit(context):
                responding = behaviour(request, context)
                if not hasattr(responding, "__aiter__"):
                    # It writes to the context by itself.
                    await responding
                    return
                async for response in responding:
                    yield response

        return make(
            limited,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


@contextlib.asynccontextmanager
async def serve_root(
    service: str, methods: Methods, path: pathlib.Path, *, listening: socket.socket | None = None
) -> AsyncIterator[None]:
    """Serve on a socket for root alone, without limits per user. Raises `ListenError`.

    listening: at `path` until now, closed by this. Connections that wait there are served as well.
    """
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    with listening or contextlib.nullcontext():
        listen.add_grpc_socket(server, path)
        async with _running(server), _forwarded(listening, path):
            yield


@contextlib.asynccontextmanager
async def _forwarded(listening: socket.socket | None, path: pathlib.Path) -> AsyncIterator[None]:
    """gRPC can use no socket that listens already: what waits there is forwarded to its own."""
    forwarder: Forwarder[None] = Forwarder(path)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_forward(forwarder, accepted), name="connection that had waited")
            for accepted in _waiting(listening)
        ]
        yield
        for task in tasks:
            task.cancel()


async def _forward(forwarder: Forwarder[None], accepted: socket.socket) -> None:
    with accepted:
        await forwarder.forward(accepted, ProxiedConnection(None), None)


def _waiting(listening: socket.socket | None) -> Iterator[socket.socket]:
    """Accept all connections that wait."""
    if listening is None:
        return
    with contextlib.suppress(OSError):
        while True:
            accepted, _ = listening.accept()
            accepted.setblocking(False)
            yield accepted


@contextlib.asynccontextmanager
async def _running(server: grpc.aio.Server) -> AsyncIterator[None]:
    await server.start()
    try:
        yield
    finally:
        await server.stop(_STOP_SECONDS)


async def decode(kind: type[RequestT], content: bytes, context: RequestContext) -> RequestT:
    """The request; ends the call if it cannot be decoded."""
    try:
        request: RequestT = kind.FromString(content)
    except DecodeError:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, f"the request is no {kind.DESCRIPTOR.full_name}"
        )
    return request
