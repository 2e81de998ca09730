"""Services and EndpointSlices from another podgate, which reads the API server for many nodes.

Only what the API server has comes from there. The rules are applied for this node here, with the
newer readiness of its own pods, so that all nodes get the same bytes.

One of several targets is used at a time, the next one after a failure. After a reconnect the same
server sends what has changed meanwhile, if it still has it; another one sends everything, and only
differences are reported. A server that was restarted without its API server sends a state that was
saved earlier: that never replaces a newer one.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import random
from collections.abc import AsyncIterator, Sequence

import grpc
import structlog

from agent import backoff
from agent.api.tls import CurrentTls
from agent.client import base
from agent.logs import Event
from agent.services.api import decode
from agent.services.api.object_source import (
    Key,
    ObjectMirror,
    OnService,
    OnSlice,
    Services,
    Slices,
    SourcePosition,
    key_of,
)
from agent.services.api.objects import ApiService, EndpointSlice
from agent.services.api.stretches import Stretches
from agent.services.client.services import METHOD
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

log = structlog.get_logger(__name__)

_CONNECT_SECONDS = 5.0
# A connection without changes is silent. A new certificate is used after this time at the latest.
_CALL_SECONDS = 300.0
# While this node has only a saved state, others may have the current one.
_SAVED_CALL_SECONDS = 15.0
_OPTIONS = (
    *base.OPTIONS,
    # A server whose machine failed closes no connection.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


Decoded = tuple[ApiService, tuple[EndpointSlice, ...]]


class _SourceError(Exception):
    """A target cannot be used now; one sentence."""


@dataclasses.dataclass(slots=True)
class _Response:
    """One call's stream."""

    header: pb.NextItem
    services: list[pb.ServiceEndpoints] = dataclasses.field(default_factory=list)
    removed: list[Key] = dataclasses.field(default_factory=list)
    service_count: int = 0

    @property
    def saved_at(self) -> datetime.datetime | None:
        if not self.header.HasField("saved_at"):
            return None
        found: datetime.datetime = self.header.saved_at.ToDatetime(datetime.UTC)
        return found

    def add(self, item: pb.NextItem) -> bool:
        """Whether the response is complete with this item."""
        kind = item.WhichOneof("item")
        if kind == "services":
            self.services += item.services.items
            self.removed += [(one.namespace, one.name) for one in item.services.removed]
        elif kind == "end":
            self.service_count = item.end.service_count
        return bool(kind == "end")


class RemoteObjects:
    """An `ObjectSource`: the first of several servers that can be used."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        tls: CurrentTls,
        on_service: OnService,
        on_slice: OnSlice,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """targets: HOST:PORT each."""
        self._targets = tuple(targets)
        self._tls = tls
        self._mirror = ObjectMirror(on_service, on_slice)
        self._slices_of: dict[Key, tuple[Key, ...]] = {}
        """The slices of each service that the server has sent."""
        self._position = (0, 0)
        self._current = 0
        self._failures = 0
        """Since a state was last received."""
        self._backoff = backoff.Backoff(base_seconds=0.5, cap_seconds=30.0, jitter=jitter)
        self._jitter = jitter
        self._problems: dict[str, str] = {}
        self._lost_at: datetime.datetime | None = None
        """When the server was lost; None while it is connected."""
        self.synced = asyncio.Event()
        self.saved_at: datetime.datetime | None = None

    @property
    def name(self) -> str:
        return ",".join(self._targets)

    @property
    def services(self) -> Services:
        return self._mirror.services

    @property
    def slices(self) -> Slices:
        return self._mirror.slices

    def as_of(self) -> datetime.datetime:
        return self.saved_at or self._lost_at or datetime.datetime.now(datetime.UTC)

    @property
    def problems(self) -> dict[str, str]:
        return {**self._problems, **({"certificates": why} if (why := self._tls.problem) else {})}

    def position(self) -> SourcePosition:
        return SourcePosition()

    def seed(
        self, services: list[ApiService], slices: list[EndpointSlice], position: SourcePosition
    ) -> None:
        self._mirror.seed(services, slices)

    async def run(self) -> None:
        while True:
            target = self._targets[self._current]
            try:
                async with self._connected(target) as channel:
                    await self._follow(channel, target)
            except _SourceError as error:
                self._fail(target, str(error))
                self._failures += 1
            self._current = (self._current + 1) % len(self._targets)
            # The others at once, but for a moment: all nodes lose a server at the same time.
            has_tried_all = self._failures >= len(self._targets)
            await asyncio.sleep(self._backoff.next_seconds() if has_tried_all else self._jitter())

    @contextlib.asynccontextmanager
    async def _connected(self, target: str) -> AsyncIterator[grpc.aio.Channel]:
        await asyncio.to_thread(self._tls.refresh)
        if self._tls.content is None:
            raise _SourceError(f"it requires a certificate: {self._tls.problem}")
        credentials = self._tls.content.channel_credentials()
        async with grpc.aio.secure_channel(target, credentials, options=_OPTIONS) as channel:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await channel.channel_ready()
            except TimeoutError:
                raise _SourceError(
                    f"no connection to {target}; check that it serves other nodes there, and that "
                    "the certificates of both are signed by --services-tls-ca"
                ) from None
            yield channel

    async def _follow(self, channel: grpc.aio.Channel, target: str) -> None:
        """Apply states until another target or certificate is to be used."""
        while True:
            seconds = _CALL_SECONDS if self.saved_at is None else _SAVED_CALL_SECONDS
            response = await self._request(channel, seconds)
            if response is not None:
                await self._receive(response, target)
            elif self.saved_at is not None and len(self._targets) > 1:
                return
            if await asyncio.to_thread(self._tls.refresh):
                return

    async def _request(self, channel: grpc.aio.Channel, seconds: float) -> _Response | None:
        """The next state; None if there was none in this time. Raises `_SourceError`."""
        request = decode.complete_filter(*self._position)
        request.accepts_delta = True
        call = channel.unary_stream(
            METHOD,
            request_serializer=pb.NextFilter.SerializeToString,
            response_deserializer=pb.NextItem.FromString,
        )(request, timeout=seconds)
        response: _Response | None = None
        try:
            async with asyncio.timeout(seconds + base.STUCK_SECONDS):
                async for item in call:
                    if item.WhichOneof("item") == "next":
                        response = _Response(item)
                    elif response is not None and response.add(item):
                        return response
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and response is None:
                return None
            details = " ".join((error.details() or error.code().name).split())
            raise _SourceError(f"it does not send services: {details}") from None
        except TimeoutError:
            raise _SourceError("it ends no call in time") from None
        finally:
            call.cancel()
        raise _SourceError("its response is incomplete; it is requested again")

    async def _receive(self, response: _Response, target: str) -> None:
        saved_at = response.saved_at
        if saved_at and self.synced.is_set() and not _is_later(saved_at, self.saved_at):
            raise _SourceError(
                f"it has only services that were saved at {saved_at.isoformat()}; those of this "
                "node are newer and stay"
            )
        decoded = await _decoded(response.services)
        if response.header.is_delta:
            await self._apply(decoded, response.removed)
        else:
            await self._replace(decoded)
        if len(self._slices_of) != response.service_count:
            self._position = (0, 0)
            raise _SourceError("its state does not match this node's; all of it is requested again")
        self._position = (response.header.next.instance_id, response.header.next.rev)
        self.saved_at = saved_at
        if self._problems or not self.synced.is_set():
            log.info(Event.SERVICES_SOURCE_READ, source=target, services=response.service_count)
        self._problems = {}
        self._lost_at = None
        self._failures = 0
        self._backoff.reset()
        self.synced.set()

    async def _apply(self, changed: Sequence[Decoded], removed: Sequence[Key]) -> None:
        """Apply a difference: each service with its slices at once."""
        stretches = Stretches()
        for key in removed:
            for name in self._slices_of.pop(key, ()):
                self._mirror.remove_slice(name)
            self._mirror.remove(key)
        for service, slices in changed:
            key, names = key_of(service), tuple(map(key_of, slices))
            for name in set(self._slices_of.get(key, ())).difference(names):
                self._mirror.remove_slice(name)
            for found in slices:
                self._mirror.put_slice(found)
            self._mirror.put(service)
            self._slices_of[key] = names
            await stretches.step()

    async def _replace(self, state: Sequence[Decoded]) -> None:
        """Apply a whole state."""
        self._slices_of = {key_of(service): tuple(map(key_of, slices)) for service, slices in state}
        await self._mirror.replace(
            {key_of(service): service for service, _ in state},
            {key_of(found): found for _, slices in state for found in slices},
        )

    def _fail(self, target: str, problem: str) -> None:
        self._lost_at = self._lost_at or datetime.datetime.now(datetime.UTC)
        if target not in self._problems:
            log.warning(Event.SERVICES_SOURCE_LOST, source=target, problem=problem)
        self._problems[target] = problem


async def _decoded(messages: Sequence[pb.ServiceEndpoints]) -> list[Decoded]:
    """Raises `_SourceError`."""
    stretches, found = Stretches(), []
    for message in messages:
        try:
            found.append(decode.decode_service(message))
        except decode.MessageError as error:
            raise _SourceError(f"its services cannot be used: {error}") from error
        await stretches.step()
    return found


def _is_later(saved_at: datetime.datetime, before: datetime.datetime | None) -> bool:
    """Whether a saved state is newer than this node's; never than one that is not saved."""
    return before is not None and saved_at > before
