"""Leader election by a Lease of coordination.k8s.io, as client-go's tools/leaderelection does it.

A candidate that sees the Lease unchanged for its duration takes it over. The leader renews it every
few seconds, and stops at its own deadline, which comes before others may take over. Both measure
time by their own clocks: the times in the object are for people.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import random
import time
from collections.abc import Callable

import msgspec
import structlog

from agent import backoff
from agent.kube import responses
from agent.kube.client import ApiClient, ApiError
from agent.logs import Event

log = structlog.get_logger(__name__)

_RELEASE_SECONDS = 3.0


def _boot_clock() -> float:
    """Seconds that also pass while the machine sleeps, when another one may take over."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseTiming:
    """How long a Lease lasts. The defaults are those of kube-controller-manager."""

    duration_seconds: int = 15
    """Other candidates wait this long after the last renewal that they saw."""
    renew_seconds: float = 10.0
    """The leader stops this long after the request of its last renewal was sent. The difference to
    the duration is time for requests that are on their way."""
    retry_seconds: float = 2.0
    """Between renewals, and between attempts."""


class LeaseSpec(msgspec.Struct, rename="camel", omit_defaults=True):
    """coordination.k8s.io/v1, LeaseSpec; times are RFC 3339 with microseconds."""

    holder_identity: str = ""
    lease_duration_seconds: int = 0
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int = 0


class LeaseMetadata(msgspec.Struct, rename="camel", omit_defaults=True):
    """The part of metav1.ObjectMeta that is read and written back."""

    name: str
    namespace: str
    resource_version: str = ""


class LeaseObject(msgspec.Struct, rename="camel"):
    """coordination.k8s.io/v1, Lease."""

    metadata: LeaseMetadata
    spec: LeaseSpec
    api_version: str = "coordination.k8s.io/v1"
    kind: str = "Lease"


class Lease:
    """One candidate's view of a Lease. `acquire`, then `hold`, then `acquire` again."""

    def __init__(
        self,
        api: ApiClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        timing: LeaseTiming | None = None,
        clock: Callable[[], float] = _boot_clock,
        now: Callable[[], datetime.datetime] = _utc_now,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """identity: of this process alone; clock: seconds, comparable within this process."""
        self.identity = identity
        self.problem = ""
        """Why the Lease cannot be read or written now; empty otherwise."""
        self._api = api
        self._namespace, self._name = namespace, name
        self._timing = timing or LeaseTiming()
        self._clock = clock
        self._now = now
        self._jitter = jitter
        self._observed: LeaseObject | None = None
        self._observed_at = 0.0
        self._held_until = float("-inf")

    @property
    def holder(self) -> str:
        """The identity in the Lease, as last seen; empty if there is none."""
        return self._observed.spec.holder_identity if self._observed else ""

    def remaining_seconds(self) -> float:
        """How long this process may still write; 0 if it is not the leader."""
        return max(0.0, self._held_until - self._clock())

    def overdue_seconds(self) -> float:
        """How long ago this process lost the Lease; 0 while it holds it."""
        return max(0.0, self._clock() - self._held_until)

    async def acquire(self) -> None:
        """Wait until this process is the leader."""
        while True:
            if await self._attempt(self._timing.renew_seconds):
                return
            # client-go's JitterFactor: candidates that lost together do not try together.
            await asyncio.sleep(self._timing.retry_seconds * (1.0 + 1.2 * self._jitter()))

    async def hold(self) -> None:
        """Renew the Lease; returns when it is lost."""
        while True:
            await asyncio.sleep(min(self._timing.retry_seconds, self.remaining_seconds()))
            remaining = self.remaining_seconds()
            if remaining <= 0:
                return
            if not await self._attempt(remaining) and self.holder != self.identity:
                self._held_until = float("-inf")
                return

    async def release(self) -> None:
        """Let another candidate take over at once. Call it when nothing is written any more."""
        if self.remaining_seconds() <= 0 or self._observed is None:
            return
        self._held_until = float("-inf")
        spec = LeaseSpec(
            lease_duration_seconds=1,
            acquire_time=self._time(),
            renew_time=self._time(),
            lease_transitions=self._observed.spec.lease_transitions,
        )
        with contextlib.suppress(ApiError):
            await self._write(spec, _RELEASE_SECONDS)

    async def _attempt(self, limit_seconds: float) -> bool:
        """Acquire or renew once: whether this process is the leader now."""
        started = self._clock()
        try:
            async with asyncio.timeout(limit_seconds):
                is_leader = await self._acquire_or_renew()
        except (ApiError, TimeoutError) as error:
            if isinstance(error, ApiError) and error.code == 409:
                return False  # Another candidate was faster.
            if not self.problem:
                log.warning(Event.LEASE_NOT_WRITTEN, lease=self._name, error=str(error))
            self.problem = str(error) or "the API server does not respond in time"
            return False
        self.problem = ""
        if is_leader:
            self._held_until = started + self._timing.renew_seconds
        return is_leader

    async def _acquire_or_renew(self) -> bool:
        if self.remaining_seconds() > 0 and self._observed:
            # Without reading it first: a conflict shows that another process wrote.
            try:
                await self._write(self._renewed(self._observed.spec), self.remaining_seconds())
                return True
            except ApiError as error:
                if error.code != 409:
                    raise
        found = await self._read()
        if found is None:
            await self._create()
            return True
        if self._observed is None or found.spec != self._observed.spec:
            self._observed_at = self._clock()
        self._observed = found
        holder = found.spec.holder_identity
        expires = self._observed_at + found.spec.lease_duration_seconds
        if holder and holder != self.identity and self._clock() < expires:
            return False
        await self._write(self._renewed(found.spec), self._timing.renew_seconds)
        return True

    def _renewed(self, before: LeaseSpec) -> LeaseSpec:
        is_mine = before.holder_identity == self.identity
        return LeaseSpec(
            holder_identity=self.identity,
            lease_duration_seconds=self._timing.duration_seconds,
            acquire_time=before.acquire_time if is_mine else self._time(),
            renew_time=self._time(),
            lease_transitions=before.lease_transitions + (not is_mine),
        )

    def _time(self) -> str:
        return self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    async def _read(self) -> LeaseObject | None:
        try:
            content = await self._api.request("GET", f"{self._path}/{self._name}")
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        return self._decoded(content)

    async def _create(self) -> None:
        made = LeaseObject(
            LeaseMetadata(self._name, self._namespace), self._renewed(LeaseSpec(self.identity))
        )
        made.spec.acquire_time = self._time()
        await self._store("POST", self._path, made, self._timing.renew_seconds)

    async def _write(self, spec: LeaseSpec, limit_seconds: float) -> None:
        """Raises `ApiError`; with code 409 if the Lease was written since it was read."""
        assert self._observed is not None
        made = LeaseObject(self._observed.metadata, spec)
        await self._store("PUT", f"{self._path}/{self._name}", made, limit_seconds)

    async def _store(self, method: str, path: str, made: LeaseObject, seconds: float) -> None:
        content = await self._api.request(
            method, path, body=msgspec.to_builtins(made), timeout_seconds=seconds
        )
        self._observed = self._decoded(content)
        self._observed_at = self._clock()

    @property
    def _path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"

    @staticmethod
    def _decoded(content: bytes) -> LeaseObject:
        try:
            return responses.decode(content, LeaseObject)
        except msgspec.DecodeError as error:
            raise ApiError(f"the API server's Lease cannot be decoded: {error}") from error
