"""The PodInfo service: read-only, for all processes on the node, limited per user."""

import asyncio
import collections
import contextlib
import pathlib
import socket
from collections.abc import AsyncIterator

import grpc

from agent.api import call_status
from agent.api.paced_user import Pace
from agent.api.podinfo.methods import GET, LIST, PODINFO, WATCH
from agent.api.podinfo.publisher import PodsPublisher, PodsSnapshot
from agent.api.rate_limits import UserRates, UserSlots
from agent.api.server import LocalServer, RequestContext, decode
from agent.client.v1alpha1 import podinfo_pb2

# A list is 0.1 ms of the agent's time and 100 kB on a full node.
_CALLS_PER_SECOND = 100.0
_BURST = 200
_MAX_WATCHES_PER_USER = 2000
_MAX_CALLS = 8192
_CONNECTIONS = 3000


class PodInfoServer:
    """Serves the snapshots of a publisher."""

    def __init__(
        self,
        publisher: PodsPublisher,
        *,
        path: pathlib.Path,
        inner: pathlib.Path,
        calls_per_second: float = _CALLS_PER_SECOND,
        burst: int = _BURST,
        connections: int = _CONNECTIONS,
        pace: Pace | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        """path: of the socket, inner: of gRPC's own, in a directory that only root enters;
        calls_per_second, burst: of each user of the node, whose calls beyond it are rejected;
        connections: of all users together; pace: of each user, who is not read beyond it;
        listening: at `path` already, closed by this."""
        self._publisher = publisher
        self._local = LocalServer(
            PODINFO,
            path=path,
            inner=inner,
            max_calls=_MAX_CALLS,
            connections=connections,
            pace=pace,
            listening=listening,
        )
        self._rates = UserRates(per_second=calls_per_second, burst=burst)
        self._watches = UserSlots(_MAX_WATCHES_PER_USER)
        self.requests = collections.Counter[str]()
        """By method, failed ones and open watches included."""
        self.errors = collections.Counter[tuple[str, str]]()
        """By method and status; a client that disconnects is no error."""

    @property
    def watches(self) -> int:
        """Open watches."""
        return self._watches.total

    @property
    def connections(self) -> int:
        return self._local.connections

    @property
    def users(self) -> list[int]:
        """Users that called, the most recent last."""
        return self._rates.users

    @property
    def pauses(self) -> int:
        """How often a user was not read for a while."""
        return self._local.pauses

    @property
    def rejected(self) -> dict[str, int]:
        """Rejected connections and calls, by limit."""
        return self._local.rejected

    async def run(self) -> None:
        """Serve until cancelled. Raises `ListenError`."""
        methods = {
            LIST: grpc.unary_stream_rpc_method_handler(self._list),
            WATCH: grpc.unary_stream_rpc_method_handler(self._watch),
            GET: grpc.unary_unary_rpc_method_handler(self._get),
        }
        async with self._local.serve(methods, is_ready=self._publisher.is_ready):
            await asyncio.Event().wait()

    async def _list(self, request: bytes, context: RequestContext) -> AsyncIterator[bytes]:
        async with self._counted(LIST, context):
            await decode(podinfo_pb2.ListPodConditionsRequest, request, context)
            await self._admit(context)
            yield (await require_snapshot(self._publisher, context)).response

    async def _get(self, request: bytes, context: RequestContext) -> bytes:
        async with self._counted(GET, context):
            decoded = await decode(podinfo_pb2.GetPodConditionsRequest, request, context)
            await self._admit(context)
            snapshot = await require_snapshot(self._publisher, context)
            response = snapshot.response_of(decoded.pod_uid)
            if response is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, "this node has no pod of that uid")
            return response

    async def _watch(self, request: bytes, context: RequestContext) -> AsyncIterator[bytes]:
        async with self._counted(WATCH, context):
            decoded = await decode(podinfo_pb2.WatchPodConditionsRequest, request, context)
            user = await self._admit(context)
            if not self._watches.has_room(user):
                await self._local.reject(context, "watches", "this user has too many watches open")
            await require_snapshot(self._publisher, context)
            instance_id, rev = decoded.instance_id, decoded.rev
            with self._watches.hold(user):
                while True:
                    snapshot = await self._publisher.wait_newer(instance_id, rev)
                    # Returns when the reader has received it; until then no other is queued.
                    yield snapshot.response
                    instance_id, rev = self._publisher.instance_id, snapshot.rev

    def _counted(
        self, method: str, context: RequestContext
    ) -> contextlib.AbstractAsyncContextManager[None]:
        def count(status: str) -> None:
            if status not in (call_status.OK, call_status.CANCELED):
                self.errors[method, status] += 1

        self.requests[method] += 1
        return call_status.counted(context, count)

    async def _admit(self, context: RequestContext) -> int:
        """The calling user, if it has not called too often."""
        user = self._local.user_of(context)
        if not self._rates.take(user):
            await self._local.reject(
                context, "rate", "this user sends too many requests; try again in a second"
            )
        return user


async def require_snapshot(publisher: PodsPublisher, context: RequestContext) -> PodsSnapshot:
    """The newest snapshot; ends the call if there is none, since no list is ever partial."""
    if publisher.snapshot is None:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the list of this node's pods is not complete: {publisher.unready_because()}",
        )
    return publisher.snapshot
