"""Looks up what the runtime's lists lack: sandboxes' namespaces, and containers' start times."""

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import math
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from agent.backoff import Backoff, no_jitter
from agent.cri.client import CriError, CriNotFoundError, Runtime
from agent.cri.models import CriContainer, CriContainerState, Sandbox, SandboxDetails
from agent.cri.sandbox_netns import SandboxNetns

# A sandbox whose shim hangs takes a call's whole timeout; the others must not wait for it.
_LOOKUP_PATIENCE_SECONDS = 1.0
_LOOKUPS_AT_ONCE = 8
_LOOKUP_RETRY_SECONDS = 0.5
_MAX_LOOKUP_RETRY_SECONDS = 60.0


@dataclasses.dataclass(slots=True)
class _Lookup:
    """A sandbox with the details that lists lack, and when to look them up again."""

    sandbox: Sandbox
    retry: Backoff
    retry_at: float
    """On the loop's clock; infinity if nothing is missing, or cannot appear any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Start:
    """When a container started, requested in this state of it."""

    state: CriContainerState
    at: datetime.datetime | None


class SandboxLookups:
    """Details of sandboxes and containers, requested when they are new, changed or due again."""

    def __init__(
        self,
        locate: Callable[[SandboxDetails], Awaitable[SandboxNetns]],
        *,
        on_late: Callable[[], None],
    ) -> None:
        """on_late: called when a lookup ends that was too slow for `update` to wait for it."""
        self._locate = locate
        self._on_late = on_late
        self._found: dict[str, _Lookup] = {}
        self._added: dict[str, Sandbox] = {}
        """Sandboxes with their details that the runtime has not listed yet."""
        self._starts: dict[str, _Start] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_LOOKUPS_AT_ONCE)

    @property
    def are_done(self) -> bool:
        return not self._running

    @property
    def next_retry_at(self) -> float:
        """When `update` has a lookup to repeat, on the loop's clock; infinity for never. Those
        that are overdue run, or their sandbox needs none any more."""
        now = asyncio.get_running_loop().time()
        due = (lookup.retry_at for lookup in self._found.values() if lookup.retry_at > now)
        return min(due, default=math.inf)

    def sandbox(self, sandbox_id: str) -> Sandbox | None:
        """A sandbox with its details; None if it has not been looked up yet."""
        found = self._found.get(sandbox_id)
        return found.sandbox if found else None

    def has(self, sandbox_id: str) -> bool:
        """Whether it has been looked up, or added."""
        return sandbox_id in self._found or sandbox_id in self._added

    def started(self, container_id: str) -> datetime.datetime | None:
        start = self._starts.get(container_id)
        return start.at if start else None

    async def aclose(self) -> None:
        for lookup in self._running.values():
            lookup.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    def add(self, sandbox: Sandbox) -> None:
        """A sandbox with its details, before the runtime lists it: it needs no request then."""
        self._added[sandbox.id] = sandbox

    def forget_others(self, sandboxes: set[str], containers: set[str]) -> None:
        """Forget all sandboxes and containers but these, by id."""
        for sandbox_id in self._found.keys() - sandboxes:
            del self._found[sandbox_id]
        for container_id in self._starts.keys() - containers:
            del self._starts[container_id]
        self._added = {id_: one for id_, one in self._added.items() if one.has_netns}

    async def update(
        self, runtime: Runtime, listed: list[Sandbox], containers: list[CriContainer]
    ) -> None:
        """Request what the lists lack. Slow lookups continue; `on_late` is called at their end."""
        needed = _needs_lookup(listed)
        for sandbox in needed:
            self._take_added(sandbox)
        due = {
            sandbox.id: functools.partial(self._lookup, runtime, sandbox)
            for sandbox in needed
            if self._is_due(sandbox)
        } | {
            container.id: functools.partial(self._read_start, runtime, container)
            for container in containers
            if self._lacks_start(container)
        }
        started = [
            self._start_lookup(key, lookup)
            for key, lookup in due.items()
            if key not in self._running
        ]
        if started:
            _, late = await asyncio.wait(started, timeout=_LOOKUP_PATIENCE_SECONDS)
            for lookup in late:
                lookup.add_done_callback(lambda _: self._on_late())
        for key in [key for key, lookup in self._running.items() if lookup.done()]:
            self._running.pop(key).result()

    def _take_added(self, sandbox: Sandbox) -> None:
        """Use what the runtime reported of a sandbox that it lists for the first time."""
        added = self._added.pop(sandbox.id, None)
        if added is None or sandbox.id in self._found or not sandbox.is_ready:
            return
        if added.has_netns:
            found = msgspec.structs.replace(sandbox, ips=added.ips, netns=added.netns)
            self._record(None, found, is_retried=False)

    def _start_lookup(self, key: str, lookup: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        async def run() -> None:
            async with self._slots:
                await lookup()

        self._running[key] = asyncio.create_task(run(), name=f"cri-{key}")
        return self._running[key]

    def _is_due(self, sandbox: Sandbox) -> bool:
        found = self._found.get(sandbox.id)
        if found is None or found.sandbox.is_ready != sandbox.is_ready:
            return True
        if found.retry_at < math.inf:
            return asyncio.get_running_loop().time() >= found.retry_at
        netns = found.sandbox.netns
        return sandbox.is_ready and netns is not None and not netns.exists()

    def _lacks_start(self, container: CriContainer) -> bool:
        start = self._starts.get(container.id)
        if container.state is CriContainerState.CREATED or (start and start.at):
            return False
        return start is None or start.state is not container.state

    async def _lookup(self, runtime: Runtime, sandbox: Sandbox) -> None:
        before = self._found.get(sandbox.id)
        try:
            details = await runtime.sandbox_details(sandbox.id)
        except CriNotFoundError:
            return
        except CriError as error:
            # The namespace found before stays: the runtime failed, not the sandbox.
            last = before.sandbox if before else sandbox
            problem = "" if last.netns else str(error)
            last = msgspec.structs.replace(last, is_ready=sandbox.is_ready, problem=problem)
            self._record(before, last, is_retried=True)
            return
        located = SandboxNetns(None) if details.host_network else await self._locate(details)
        if located.is_unknown and before:
            # Not the sandbox' failure: it is found soon after this process can read again.
            before.retry.reset()
        if located.problem and sandbox.is_ready and before and before.retry.failures == 0:
            # Most likely it is being stopped, which the next list shows: no reason for a warning.
            self._record(before, before.sandbox, is_retried=True)
            return
        found = msgspec.structs.replace(
            sandbox,
            host_network=details.host_network,
            ips=details.ips,
            netns=located.netns,
            problem=located.problem,
        )
        # The namespace of a sandbox that is not ready exists or never will again.
        self._record(before, found, is_retried=bool(located.problem) and sandbox.is_ready)

    def _record(self, before: _Lookup | None, sandbox: Sandbox, *, is_retried: bool) -> None:
        retry = before.retry if before else _retry()
        retry_at = math.inf
        if is_retried:
            retry_at = asyncio.get_running_loop().time() + retry.next_seconds()
        else:
            retry.reset()
        self._found[sandbox.id] = _Lookup(sandbox, retry, retry_at)

    async def _read_start(self, runtime: Runtime, container: CriContainer) -> None:
        with contextlib.suppress(CriError):
            started = await runtime.container_started(container.id)
            self._starts[container.id] = _Start(container.state, started)


def _retry() -> Backoff:
    return Backoff(
        base_seconds=_LOOKUP_RETRY_SECONDS,
        cap_seconds=_MAX_LOOKUP_RETRY_SECONDS,
        jitter=no_jitter,
    )


def _needs_lookup(listed: Iterable[Sandbox]) -> list[Sandbox]:
    """All ready sandboxes, and of other pods the newest: its containers may still run."""
    ready = [sandbox for sandbox in listed if sandbox.is_ready]
    with_ready = {sandbox.pod_uid for sandbox in ready}
    last: dict[str, Sandbox] = {}
    for sandbox in sorted(listed, key=lambda sandbox: sandbox.age_order):
        if sandbox.pod_uid not in with_ready:
            last[sandbox.pod_uid] = sandbox
    return [*ready, *last.values()]
