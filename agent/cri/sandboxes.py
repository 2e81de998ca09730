"""The sandboxes of a node's pods, kept as the runtime lists them.

The list is the truth and is asked for again and again; events of the runtime, and whoever calls
`Sandboxes.hint`, only have it asked for sooner. While the runtime does not answer, what was known
last stays: its restart ends no pod.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import math
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog

from agent import tasks
from agent.cri import events
from agent.cri.client import CriError, CriNotFoundError, Runtime
from agent.cri.events import RuntimeEvents
from agent.cri.models import CriContainer, CriContainerState, Sandbox, SandboxDetails
from agent.cri.sandbox_netns import SandboxNetns

log = structlog.get_logger(__name__)

# As the kubelet's own (pkg/kubelet/kubelet.go: plegRelistPeriod), where nothing tells of changes.
_RELIST_SECONDS = 1.0
# Where the runtime sends events: bounds what a lost one costs.
_RELIST_WITH_EVENTS_SECONDS = 10.0
# An event comes some ms before the lists show what it tells of, and a namespace goes after that.
_ECHO_SECONDS = (0.1, 0.4)
# A burst of events is one list for each of these; a list of 250 pods costs some ms.
_MIN_GAP_SECONDS = 0.1
# A sandbox whose shim hangs takes as long as a call may; the others are not to wait for it.
_LOOKUP_PATIENCE_SECONDS = 1.0
_LOOKUPS_AT_ONCE = 8
_LOOKUP_RETRY_SECONDS = (0.5, 60.0)


@dataclasses.dataclass(slots=True)
class _Lookup:
    """What was found of one sandbox beyond the list, and when to look again."""

    sandbox: Sandbox
    failures: int
    retry_at: float
    """On the loop's clock; infinity where nothing is missing, or nothing will come."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Start:
    """When a container started, as asked for in this state of it."""

    state: CriContainerState
    at: datetime.datetime | None


class Sandboxes:
    """Follows a runtime. Callbacks come on the event loop, one pass after the other.

    Each pod has one current sandbox: the ready one with the highest attempt. One that is no longer
    ready stays current for as long as its network namespace stands and no other took over: its
    containers may still run, and must stay gated.
    """

    def __init__(
        self,
        open_runtime: Callable[[], Awaitable[Runtime]],
        locate: Callable[[SandboxDetails], Awaitable[SandboxNetns]],
        *,
        on_sandbox: Callable[[Sandbox], None],
        on_removed: Callable[[Sandbox], None],
        on_containers: Callable[[Sandbox, tuple[CriContainer, ...]], None],
        on_relist: Callable[[], None] = lambda: None,
    ) -> None:
        """on_sandbox gets a pod's current sandbox when it is new or changed, also when it takes
        over from another; on_removed the last one of a pod that has none any more; on_containers
        the newest container of each name, after `on_sandbox`; on_relist is called after all that
        one list had to tell.
        """
        self._open_runtime = open_runtime
        self._locate = locate
        self._on_sandbox = on_sandbox
        self._on_removed = on_removed
        self._on_containers = on_containers
        self._on_relist = on_relist
        self._runtime: Runtime | None = None
        self._found: dict[str, _Lookup] = {}
        self._starts: dict[str, _Start] = {}
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(_LOOKUPS_AT_ONCE)
        self._events = RuntimeEvents(lambda: self._runtime, self.hint)
        self._hinted = asyncio.Event()
        self._echoes: list[float] = []
        self.current: dict[str, Sandbox] = {}
        """The current sandbox of each pod, by the runtime's UID for it."""
        self.containers: dict[str, tuple[CriContainer, ...]] = {}
        """What `on_containers` was told last, by the same UIDs."""
        self.relists = 0
        """How often the runtime has answered with all it has."""
        self.problem = "the container runtime has not been asked yet."
        """One sentence why its last answer is old, or nothing."""

    @property
    def is_settled(self) -> bool:
        """Whether the runtime answers, and every ready sandbox of its last list is known."""
        return not self.problem and not self._lookups

    @property
    def has_events(self) -> bool:
        """Whether the runtime tells of changes by itself."""
        return self._events.are_coming

    def hint(self) -> None:
        """Something happened that the runtime's lists may show now or in a moment."""
        self._hinted.set()

    async def run(self) -> None:
        """Follow the runtime until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks.start(group, "cri-events", self._events.run)
                while True:
                    await self._relist_once()
                    await self._wait()
        finally:
            for lookup in self._lookups.values():
                lookup.cancel()
            await asyncio.gather(*self._lookups.values(), return_exceptions=True)
            if self._runtime is not None:
                await self._runtime.aclose()

    async def relist(self) -> None:
        """Ask once, and tell what changed. Raises `CriError`; then nothing changes."""
        if self._runtime is None:
            self._runtime = await self._open_runtime()
        listed = await self._runtime.list_sandboxes()
        containers = await self._runtime.list_containers()
        await self._look_up(self._runtime, listed, containers)
        current = self._choose(listed)
        self._forget({one.id for one in listed}, {one.id for one in containers})
        self.relists += 1
        self._publish(current, containers)

    async def _relist_once(self) -> None:
        problem = ""
        try:
            await self.relist()
        except CriError as error:
            problem = str(error)
        if problem and problem != self.problem:
            log.warning("sandboxes stay as they were last known", problem=problem)
        elif self.problem and not problem:
            log.info("container runtime answers", sandboxes=len(self.current))
        self.problem = problem
        if not problem:
            self._on_relist()

    async def _wait(self) -> None:
        """Until a hint or its echo, else for the time between lists."""
        seconds = _RELIST_WITH_EVENTS_SECONDS if self.has_events else _RELIST_SECONDS
        if self.problem:
            seconds = _RELIST_SECONDS
        if self._echoes:
            seconds = self._echoes.pop(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.sleep(min(_MIN_GAP_SECONDS, seconds))
                await self._hinted.wait()
        if self._hinted.is_set():
            self._hinted.clear()
            self._echoes = list(_ECHO_SECONDS)

    async def _look_up(
        self, runtime: Runtime, listed: list[Sandbox], containers: list[CriContainer]
    ) -> None:
        """Ask for what lists do not tell; what takes long is there in a later pass."""
        wanted = {
            sandbox.id: functools.partial(self._lookup, runtime, sandbox)
            for sandbox in _needs_lookup(listed)
            if self._is_due(sandbox)
        } | {
            container.id: functools.partial(self._read_start, runtime, container)
            for container in containers
            if self._lacks_start(container)
        }
        begun = [
            self._start_lookup(key, look)
            for key, look in wanted.items()
            if key not in self._lookups
        ]
        if begun:
            _, late = await asyncio.wait(begun, timeout=_LOOKUP_PATIENCE_SECONDS)
            for lookup in late:
                lookup.add_done_callback(lambda _: self.hint())
        for key in [key for key, lookup in self._lookups.items() if lookup.done()]:
            self._lookups.pop(key).result()

    def _start_lookup(self, key: str, look: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        async def take_turn() -> None:
            async with self._turns:
                await look()

        self._lookups[key] = asyncio.create_task(take_turn(), name=f"cri-{key}")
        return self._lookups[key]

    def _is_due(self, sandbox: Sandbox) -> bool:
        looked = self._found.get(sandbox.id)
        if looked is None or looked.sandbox.is_ready != sandbox.is_ready:
            return True
        if looked.retry_at < math.inf:
            return asyncio.get_running_loop().time() >= looked.retry_at
        netns = looked.sandbox.netns
        return sandbox.is_ready and netns is not None and not netns.exists()

    def _lacks_start(self, container: CriContainer) -> bool:
        known = self._starts.get(container.id)
        if container.state is CriContainerState.CREATED or (known and known.at):
            return False
        return known is None or known.state is not container.state

    async def _lookup(self, runtime: Runtime, sandbox: Sandbox) -> None:
        before = self._found.get(sandbox.id)
        try:
            details = await runtime.sandbox_details(sandbox.id)
        except CriNotFoundError:
            return
        except CriError as error:
            # The runtime's trouble: what is known of the namespace stays.
            known = before.sandbox if before else sandbox
            problem = "" if known.netns else str(error)
            known = msgspec.structs.replace(known, is_ready=sandbox.is_ready, problem=problem)
            self._record(before, known, is_to_be_retried=True)
            return
        located = SandboxNetns(None) if details.host_network else await self._locate(details)
        if located.problem and sandbox.is_ready and before and before.failures == 0:
            # Most likely it ends just now, which the next list says: no reason for an alarm.
            self._record(before, before.sandbox, is_to_be_retried=True)
            return
        found = msgspec.structs.replace(
            sandbox,
            host_network=details.host_network,
            ips=details.ips,
            netns=located.netns,
            problem=located.problem,
        )
        # The namespace of one that is not ready is there or is gone for good.
        self._record(before, found, is_to_be_retried=bool(located.problem) and sandbox.is_ready)

    def _record(self, before: _Lookup | None, sandbox: Sandbox, *, is_to_be_retried: bool) -> None:
        failures, retry_at = 0, math.inf
        if is_to_be_retried:
            failures = before.failures + 1 if before else 1
            retry_at = asyncio.get_running_loop().time() + events.growing(
                _LOOKUP_RETRY_SECONDS, failures - 1
            )
        self._found[sandbox.id] = _Lookup(sandbox, failures, retry_at)

    async def _read_start(self, runtime: Runtime, container: CriContainer) -> None:
        with contextlib.suppress(CriError):
            started = await runtime.container_started(container.id)
            self._starts[container.id] = _Start(container.state, started)

    def _choose(self, listed: Iterable[Sandbox]) -> dict[str, Sandbox]:
        """Each pod's current sandbox. Sandboxes that were not looked at yet wait their turn."""
        chosen: dict[str, Sandbox] = {}
        for sandbox in listed:
            looked = self._found.get(sandbox.id)
            if looked is None:
                continue
            one = msgspec.structs.replace(looked.sandbox, is_ready=sandbox.is_ready)
            best = chosen.get(one.pod_uid)
            if _is_alive(one) and (best is None or _precedence(one) > _precedence(best)):
                chosen[one.pod_uid] = one
        for uid, sandbox in self.current.items():
            kept = msgspec.structs.replace(sandbox, is_ready=False)
            best = chosen.get(uid)
            if _is_alive(kept) and (best is None or _precedence(kept) > _precedence(best)):
                chosen[uid] = kept
        return chosen

    def _forget(self, sandboxes: set[str], containers: set[str]) -> None:
        for sandbox_id in self._found.keys() - sandboxes:
            del self._found[sandbox_id]
        for container_id in self._starts.keys() - containers:
            del self._starts[container_id]

    def _publish(self, current: dict[str, Sandbox], containers: Iterable[CriContainer]) -> None:
        before, self.current = self.current, current
        newest = self._newest(containers)
        for uid in before.keys() - current.keys():
            self.containers.pop(uid, None)
            log.info("sandbox gone", pod=before[uid].full_name, sandbox=before[uid].id)
            self._on_removed(before[uid])
        for uid, sandbox in current.items():
            if sandbox != before.get(uid):
                _log_change(before.get(uid), sandbox)
                self._on_sandbox(sandbox)
            ours = newest.get(sandbox.id, ())
            if ours != self.containers.get(uid, ()):
                self.containers[uid] = ours
                self._on_containers(sandbox, ours)

    def _newest(self, containers: Iterable[CriContainer]) -> dict[str, tuple[CriContainer, ...]]:
        """The newest of each name, by sandbox; in the order of names."""
        found: dict[tuple[str, str], CriContainer] = {}
        for container in sorted(containers, key=_container_order):
            found[container.sandbox_id, container.name] = container
        grouped: dict[str, tuple[CriContainer, ...]] = {}
        for (sandbox_id, _), container in sorted(found.items()):
            start = self._starts.get(container.id)
            one = msgspec.structs.replace(container, started=start.at if start else None)
            grouped[sandbox_id] = (*grouped.get(sandbox_id, ()), one)
        return grouped


def _needs_lookup(listed: Iterable[Sandbox]) -> list[Sandbox]:
    """All ready ones, and of a pod without any the newest: its containers may still run."""
    ready = [one for one in listed if one.is_ready]
    with_ready = {one.pod_uid for one in ready}
    last: dict[str, Sandbox] = {}
    for one in sorted(listed, key=lambda one: one.age_order):
        if one.pod_uid not in with_ready:
            last[one.pod_uid] = one
    return [*ready, *last.values()]


def _is_alive(sandbox: Sandbox) -> bool:
    """Whether something may run in it: it is ready, or its namespace stands."""
    return sandbox.is_ready or (sandbox.netns is not None and sandbox.netns.exists())


def _precedence(sandbox: Sandbox) -> tuple[bool, int, float]:
    return (sandbox.is_ready, *sandbox.age_order)


def _container_order(container: CriContainer) -> tuple[float, int]:
    return container.created.timestamp() if container.created else 0.0, container.attempt


def _log_change(before: Sandbox | None, sandbox: Sandbox) -> None:
    facts = {
        "pod": sandbox.full_name,
        "sandbox": sandbox.id,
        "attempt": sandbox.attempt,
        "netns": sandbox.netns.path if sandbox.netns else None,
    }
    if sandbox.problem:
        log.warning("sandbox without a usable network namespace", **facts, problem=sandbox.problem)
    elif before is None or before.id != sandbox.id:
        log.info("sandbox found", **facts)
    elif not sandbox.is_ready:
        log.info("sandbox given up by its runtime; its namespace still stands", **facts)
