"""The Conditions service: each owner's session is a stream, open while the owner is present."""

import asyncio
import collections
import contextlib
import pathlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import grpc
import structlog

from agent.api import call_status
from agent.api.conditions import reporters
from agent.api.conditions.owned_conditions import OwnedConditions, Session
from agent.api.conditions.owner import ConditionOwner
from agent.api.conditions.reporters import AccountOf, Reporter
from agent.api.conditions.validation import RejectedError
from agent.api.rate_limits import UserRates, UserSlots
from agent.api.server import LocalServer, RequestContext, decode
from agent.backoff import Bucket
from agent.client.v1alpha1 import conditions_pb2 as pb
from agent.logs import Event

log = structlog.get_logger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Conditions"].full_name
PUBLISH = "Publish"

# A client that is rejected retries every half second; agents that restart together open at once.
_OPENS_PER_SECOND = 5.0
_OPENS_BURST = 50
# The old and the new one of each owner during a roll-out.
_MAX_STREAMS_PER_USER = 32
_MAX_CALLS = 256
_CONNECTIONS = 512
# Of an owner that reports all conditions of a full node at once.
_CHANGES_BURST = 500


class ConditionsServer:
    """Serves the owners that are registered."""

    def __init__(
        self,
        owned: OwnedConditions,
        *,
        path: pathlib.Path,
        inner: pathlib.Path,
        account_of: AccountOf,
        unready_because: Callable[[], str | None],
        is_ready: asyncio.Event,
    ) -> None:
        """path: of the socket, inner: of gRPC's own, in a directory that only root enters;
        account_of: of pods; unready_because: why the node's pods are not all known yet, one
        sentence, until `is_ready` is set."""
        self._owned = owned
        self._account_of = account_of
        self._unready_because = unready_because
        self._is_ready = is_ready
        self._local = LocalServer(
            SERVICE,
            path=path,
            inner=inner,
            max_calls=_MAX_CALLS,
            connections=_CONNECTIONS,
            has_processes=True,
        )
        self._opens = UserRates(per_second=_OPENS_PER_SECOND, burst=_OPENS_BURST)
        self._streams = UserSlots(_MAX_STREAMS_PER_USER)
        self._rates: dict[str, tuple[int, Bucket]] = {}
        self.rejected = collections.Counter[tuple[str, str]]()
        """Requests in streams that were rejected, by domain and status."""
        self.ended = collections.Counter[str]()
        """Streams that have ended, by status."""

    async def run(self) -> None:
        """Serve until cancelled. Raises `ListenError`."""
        methods = {PUBLISH: grpc.stream_stream_rpc_method_handler(self._publish)}
        async with self._local.serve(methods, is_ready=self._is_ready):
            log.info(Event.CONDITIONS_API_SERVING, socket=str(self._local.path))
            await asyncio.Event().wait()

    async def _publish(
        self, requests: AsyncIterator[bytes], context: RequestContext
    ) -> AsyncIterator[bytes]:
        async with call_status.counted(context, self._count):
            user = self._local.user_of(context)
            if not self._opens.take(user):
                await self._local.reject(
                    context, "rate", "this user opens too many streams; try again in a second"
                )
            if not self._streams.has_room(user):
                await self._local.reject(context, "streams", "this user has too many streams open")
            with self._streams.hold(user), contextlib.ExitStack() as stack:
                first = await anext(requests, None)
                request = await decode(pb.PublishRequest, first or b"", context)
                if request.WhichOneof("action") != "open":
                    await context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT, "the first request of a stream is open"
                    )
                owner = await self._admit(request.open.owner, context)
                session = self._owned.open(owner.domain)
                stack.callback(self._owned.close, session)
                yield pb.PublishResponse(number=request.number).SerializeToString()
                following = self._follow(session, requests, owner, context)
                async with contextlib.aclosing(following) as responses:
                    async for response in responses:
                        yield response.SerializeToString()

    async def _follow(
        self,
        session: Session,
        requests: AsyncIterator[bytes],
        owner: ConditionOwner,
        context: RequestContext,
    ) -> AsyncGenerator[pb.PublishResponse]:
        """Responses to requests, and notices, while the session is open."""
        reading = asyncio.ensure_future(anext(requests, None))
        reading.add_done_callback(lambda _: session.wake.set())
        try:
            while True:
                await session.wake.wait()
                session.wake.clear()
                owners = self._owned.owners or {}
                if owners.get(owner.domain) != owner:
                    # Another registration may name other processes.
                    owner = await self._admit(owner.domain, context)
                while session.resets:
                    uid, kind = next(iter(session.resets))
                    del session.resets[uid, kind]
                    yield pb.PublishResponse(reset=pb.Remove(pod_uid=uid, type=kind))
                if not reading.done():
                    continue
                content = reading.result()
                if content is None:
                    return
                request = await decode(pb.PublishRequest, content, context)
                yield await self._respond(session, request, owner)
                reading = asyncio.ensure_future(anext(requests, None))
                reading.add_done_callback(lambda _: session.wake.set())
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _respond(
        self, session: Session, request: pb.PublishRequest, owner: ConditionOwner
    ) -> pb.PublishResponse:
        response = pb.PublishResponse(number=request.number)
        changes = self._owned.changes[owner.domain]
        try:
            match request.WhichOneof("action"):
                case "set":
                    response.sandbox = self._owned.report(session, request.set)
                case "remove":
                    self._owned.remove(session, request.remove.pod_uid, request.remove.type)
                case "complete":
                    self._owned.complete(session)
                case _:
                    raise RejectedError(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        "the stream is open; a request is set, remove or complete",
                    )
        except RejectedError as error:
            response.code, response.message = error.code.value[0], str(error)
            self.rejected[owner.domain, call_status.name(error.code)] += 1
        if response.code or self._owned.changes[owner.domain] != changes:
            # A report that confirms costs nothing more; the owner's next request waits.
            await self._bucket(owner).wait()
        return response

    async def _admit(self, domain: str, context: RequestContext) -> ConditionOwner:
        """The owner, if its registration names the calling process; else the call ends."""
        owners = self._owned.owners
        if owners is None or not self._is_ready.is_set():
            why = "ConditionOwners are not read yet"
            if owners is not None:
                why = self._unready_because() or "the list of this node's pods is not complete"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"try again: {why}")
        owner = owners.get(domain)
        if owner is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"there is no ConditionOwner {domain[:253]!r}"
            )
        client = self._local.client_of(context)
        user, cgroup = -1, None
        if client:
            user = client.user
            if client.process:
                cgroup = await asyncio.to_thread(client.process.cgroup)
        if not reporters.is_named(Reporter(user, cgroup), owner, self._account_of):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the ConditionOwner {domain} names other processes than this one (user {user}, "
                f"cgroup {cgroup or 'unknown'})",
            )
        return owner

    def _bucket(self, owner: ConditionOwner) -> Bucket:
        """Of all of the owner's sessions."""
        rate = owner.spec.changes_per_second
        found = self._rates.get(owner.domain)
        if found is None or found[0] != rate:
            found = rate, Bucket(per_second=rate, burst=max(_CHANGES_BURST, rate))
            self._rates[owner.domain] = found
        return found[1]

    def _count(self, status: str) -> None:
        self.ended[status] += 1
