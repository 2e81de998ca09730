"""The PodInfo service on its socket: read-only, for everybody on the node, in bounds."""

import asyncio
import collections
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from agent.api.peer_credentials import DoorError, Doorway
from agent.api.podinfo.publisher import Snapshot, Telling
from agent.backoff import Bucket
from agent.client import podinfo_pb2

log = structlog.get_logger(__name__)

SERVICE: Final = podinfo_pb2.DESCRIPTOR.services_by_name["PodInfo"].full_name
LIST: Final = "ListPodConditions"
WATCH: Final = "WatchPodConditions"
GET: Final = "GetPodConditions"

# A list is 0.1 ms of the agent's time and 100 kB on a full node.
_CALLS_PER_SECOND: Final = 100.0
_BURST: Final = 200
_WATCHES_EACH: Final = 2000
# Of health and reflection, which stay open for as long as somebody likes.
_STREAMS_EACH: Final = 100
_CONNECTIONS: Final = 3000
# Of users that asked once; the one that asked longest ago is forgotten first, and starts anew.
_MOST_USERS: Final = 1024

OPTIONS: Final = (
    # Requests are an id and two numbers.
    ("grpc.max_receive_message_length", 16 << 10),
    ("grpc.max_concurrent_streams", 100),
    # Who connects and says nothing, or nothing any more, has no need of a connection.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.so_reuseport", 0),
)
# Whatever is asked: health and reflection are asked by the same readers.
_MOST_CALLS: Final = 8192
_STOP_SECONDS: Final = 0.5

RequestT = TypeVar("RequestT", bound=Message)


class Asker(Protocol):
    """What is used of grpc.aio.ServicerContext."""

    def peer(self) -> str: ...

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...


class PodInfoServer:
    """Serves what a `Telling` has."""

    def __init__(
        self,
        telling: Telling,
        *,
        path: pathlib.Path,
        inner: pathlib.Path,
        calls_per_second: float = _CALLS_PER_SECOND,
        burst: int = _BURST,
        connections: int = _CONNECTIONS,
    ) -> None:
        """path: of the socket, inner: of gRPC's own, in a directory for root only;
        calls_per_second, burst: of each user of the node; connections: of all users together."""
        self._telling = telling
        self._path = path
        self._inner = inner
        self._doorway = Doorway(path, inner, connections=connections)
        self._make_bucket: Callable[[], Bucket] = lambda: Bucket(
            per_second=calls_per_second, burst=burst
        )
        self._buckets: collections.OrderedDict[int, Bucket] = collections.OrderedDict()
        self._watches: collections.Counter[int] = collections.Counter()
        self._others: collections.Counter[int] = collections.Counter()
        self._health = health.aio.HealthServicer()
        self.requests: Final = collections.Counter[str]()
        """By method, whatever became of them."""
        self.errors: Final = collections.Counter[str]()
        self._refused: Final = collections.Counter[str]()

    @property
    def watchers(self) -> int:
        return self._watches.total()

    @property
    def connections(self) -> int:
        return self._doorway.open

    @property
    def users(self) -> list[int]:
        """Who has asked, the last one at the end."""
        return list(self._buckets)

    def refusals(self) -> dict[str, int]:
        """By what somebody had too much of."""
        return {"connections": self._doorway.refused, **self._refused}

    async def run(self) -> None:
        """Serve until cancelled. Raises `DoorError`."""
        server = grpc.aio.server(
            interceptors=(_OthersStreams(self._let_others_in),),
            options=OPTIONS,
            maximum_concurrent_rpcs=_MOST_CALLS,
        )
        server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await self._say_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        bind(server, self._inner)
        await server.start()
        try:
            async with self._doorway.standing():
                log.info("what is true of pods is told", socket=str(self._path))
                await self._telling.is_ready.wait()
                await self._say_health(health_pb2.HealthCheckResponse.SERVING)
                await asyncio.Event().wait()
        finally:
            await server.stop(_STOP_SECONDS)

    async def _say_health(self, status: Any) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

    def _handlers(self) -> grpc.GenericRpcHandler:
        # Requests are read here and not by grpcio, which would call what is none a fault of ours.
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                LIST: grpc.unary_stream_rpc_method_handler(self._list),
                WATCH: grpc.unary_stream_rpc_method_handler(self._watch),
                GET: grpc.unary_unary_rpc_method_handler(self._get),
            },
        )

    async def _list(self, request: bytes, context: Asker) -> AsyncIterator[bytes]:
        async with self._counted(LIST):
            await self._read(podinfo_pb2.ListPodConditionsRequest, request, context)
            await self._let_in(context)
            yield (await self._ready(context)).everything

    async def _get(self, request: bytes, context: Asker) -> bytes:
        async with self._counted(GET):
            asked = await self._read(podinfo_pb2.GetPodConditionsRequest, request, context)
            await self._let_in(context)
            found = (await self._ready(context)).one(asked.pod_uid)
            if found is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, "this node has no pod of that uid")
            return found

    async def _watch(self, request: bytes, context: Asker) -> AsyncIterator[bytes]:
        async with self._counted(WATCH):
            asked = await self._read(podinfo_pb2.WatchPodConditionsRequest, request, context)
            user = await self._let_in(context)
            if self._watches[user] >= _WATCHES_EACH:
                await self._refuse(context, "watches", "this user has too many watches open")
            await self._ready(context)
            told = asked.rev if asked.instance_id == self._telling.instance_id else 0
            self._watches[user] += 1
            try:
                while True:
                    snapshot = await self._telling.newer(told)
                    # Done when the reader has taken it; until then nothing else is queued.
                    yield snapshot.everything
                    told = snapshot.rev
            finally:
                self._watches[user] -= 1
                if not self._watches[user]:
                    del self._watches[user]

    @contextlib.asynccontextmanager
    async def _counted(self, method: str) -> AsyncIterator[None]:
        self.requests[method] += 1
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            # Who asked has gone.
            raise
        except BaseException:
            self.errors[method] += 1
            raise

    async def _read(self, kind: type[RequestT], content: bytes, context: Asker) -> RequestT:
        try:
            read: RequestT = kind.FromString(content)
        except DecodeError:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"this is no {kind.DESCRIPTOR.full_name}"
            )
        return read

    async def _let_in(self, context: Asker) -> int:
        """The user who asks, if it does not ask too often."""
        user = self._doorway.user_of(context.peer())
        bucket = self._buckets.get(user) or self._make_bucket()
        self._buckets[user] = bucket
        self._buckets.move_to_end(user)
        if len(self._buckets) > _MOST_USERS:
            self._buckets.popitem(last=False)
        if bucket.seconds_until_next() > 0:
            await self._refuse(context, "rate", "this user asks too often; try again in a second")
        bucket.take()
        return user

    @contextlib.asynccontextmanager
    async def _let_others_in(self, context: Asker) -> AsyncIterator[None]:
        user = self._doorway.user_of(context.peer())
        if self._others[user] >= _STREAMS_EACH:
            await self._refuse(context, "streams", "this user has too many streams open")
        self._others[user] += 1
        try:
            yield
        finally:
            self._others[user] -= 1
            if not self._others[user]:
                del self._others[user]

    async def _refuse(self, context: Asker, reason: str, message: str) -> NoReturn:
        self._refused[reason] += 1
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)

    async def _ready(self, context: Asker) -> Snapshot:
        return self._telling.snapshot or await not_ready(self._telling, context)


class _OthersStreams(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Has every stream of the services that are not ours pass `let_in`."""

    def __init__(
        self, let_in: Callable[[Asker], contextlib.AbstractAsyncContextManager[None]]
    ) -> None:
        self._let_in = let_in

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not handler.response_streaming:
            return handler
        if details.method.startswith(f"/{SERVICE}/"):
            return handler
        is_stream = handler.request_streaming
        behaviour = handler.stream_stream if is_stream else handler.unary_stream
        make = (
            grpc.stream_stream_rpc_method_handler
            if is_stream
            else grpc.unary_stream_rpc_method_handler
        )

        async def limited(request: Any, context: Asker) -> AsyncIterator[Any]:
            async with self._let_in(context):
                answering = behaviour(request, context)
                if not hasattr(answering, "__aiter__"):
                    # It writes to the context by itself.
                    await answering
                    return
                async for answer in answering:
                    yield answer

        return make(
            limited,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


async def not_ready(telling: Telling, context: Asker) -> NoReturn:
    """Nothing is told in part."""
    await context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"not every pod of this node has been looked at: {telling.unready_because()}",
    )


def bind(server: grpc.aio.Server, path: pathlib.Path) -> None:
    """Have gRPC listen on a path that only root reaches. Raises `DoorError`."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        # Left by an agent before this one; a living one holds the run directory's lock.
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError) as error:
        raise DoorError(
            f"cannot make the socket {path} ({error}); choose another directory with "
            "--run-directory"
        ) from error
