"""The current sandbox of each of a node's pods, polled from the runtime.

The list is authoritative and polled; runtime events and `Sandboxes.hint` only trigger it sooner.
While the runtime is unreachable, the last known sandboxes stay: its restart ends no pod.
"""

import asyncio
import contextlib
import datetime
import json
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog

from agent import tasks
from agent.cri import networked
from agent.cri.client import CriError, CriStuckError, Runtime
from agent.cri.events import RuntimeEvents
from agent.cri.lookups import SandboxLookups
from agent.cri.models import CriContainer, NetworkedSandbox, Sandbox, SandboxDetails
from agent.cri.sandbox_netns import SandboxNetns
from agent.logs import Event
from agent.pods.changes import Changes

log = structlog.get_logger(__name__)

# As the kubelet's own (pkg/kubelet/kubelet.go: plegRelistPeriod), for a runtime without events.
_RELIST_SECONDS = 1.0
# With events: the delay that a lost one causes.
_RELIST_WITH_EVENTS_SECONDS = 10.0
# An event arrives some ms before the lists show its change, and a namespace vanishes after that.
_ECHO_SECONDS = (0.1, 0.4)
# A burst of events causes one list per gap; a list of 250 pods costs some ms.
_MIN_GAP_SECONDS = 0.1
# Of a node with many pods, a list and its lookups take longer, of both processes.
_GAP_PER_SECOND, _MAX_GAP_SECONDS = 2.0, 0.25
# Containers may be ready 40 ms after their sandbox, and the kubelet takes a condition that comes
# after them a second later. So while a pod has no sandbox, and for this long after a hint, only
# sandboxes are listed, more often. IPv6 needs two seconds to detect duplicate addresses.
_AWAITED_SECONDS = 3.0
_AWAITED_GAP_SECONDS = 0.01
# Of the time, for the runtime's sake; a busy one is listed as often as by hints.
_AWAITED_SHARE = 0.2
_TICK_SECONDS = 0.001
# A sandbox that comes while the first list is made is in the second.
_COMPLETE_RELISTS = 2
# One may be the event loop's delay on a busy node.
_STUCK_CALLS = 2


class Sandboxes:
    """Follows a runtime.

    Each pod has one current sandbox: the ready one with the highest attempt. A sandbox that is no
    longer ready stays current while its network namespace exists and no other replaces it: its
    containers may still run, and must stay gated.
    """

    def __init__(
        self,
        open_runtime: Callable[[], Awaitable[Runtime]],
        locate: Callable[[SandboxDetails], Awaitable[SandboxNetns]],
        *,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> None:
        """is_awaited: whether a pod of the node should get a sandbox soon."""
        self._open_runtime = open_runtime
        self._runtime: Runtime | None = None
        self._locate = locate
        self._lookups = SandboxLookups(locate, on_late=self.hint)
        self._events = RuntimeEvents(lambda: self._runtime, self.hint)
        self._is_awaited = is_awaited
        self._hinted = asyncio.Event()
        self._hinted_at = 0.0
        self._reports_networked = False
        """Whether the runtime reports sandboxes before it lists them."""
        self._listed_ids: set[str] = set()
        self._gap_seconds = _MIN_GAP_SECONDS
        self._echoes: list[float] = []
        self.current: dict[str, Sandbox] = {}
        """The current sandbox of each pod, by the runtime's UID for it."""
        self.containers: dict[str, tuple[CriContainer, ...]] = {}
        """Of current sandboxes, the newest container of each name, by the same UIDs."""
        self.changes = Changes()
        """Pods whose current sandbox, or a container of it, was added, changed or removed."""
        self.listed = asyncio.Event()
        """Set once all sandboxes have been listed, so that a missing one means something."""
        self.listed_at = 0.0
        """When the newest complete list started, by the event loop's clock."""
        self.relists = 0
        """Complete lists received."""
        self._stuck_calls = 0
        self.problem = "the container runtime has not listed its sandboxes yet."
        """Why the sandboxes may be outdated, in one sentence; else empty."""

    @property
    def is_settled(self) -> bool:
        """Whether the runtime responds, and all lookups of its last list are done."""
        return not self.problem and self._lookups.are_done

    @property
    def is_complete(self) -> bool:
        """Whether `current` has all sandboxes of the node; not while the runtime is unreachable."""
        return self.relists >= _COMPLETE_RELISTS and self.is_settled

    @property
    def is_stuck(self) -> bool:
        """Whether the runtime can be read by another process only: see `CriStuckError`."""
        return self._stuck_calls >= _STUCK_CALLS

    @property
    def has_events(self) -> bool:
        """Whether the runtime sends events."""
        return self._events.is_open

    def hint(self) -> None:
        """The runtime's lists may have changed, or may change in a moment."""
        self._hinted_at = asyncio.get_running_loop().time()
        self._hinted.set()

    async def add(self, added: NetworkedSandbox, *, is_started: bool = False) -> None:
        """A sandbox that has its network, and that the runtime is about to list.

        It is the pod's current one until the runtime lists it, or its namespace is gone, unless the
        pod has a ready one. Its path is verified as those that the runtime reports. is_started:
        whether the runtime itself reports that it starts now, so that no other is ready any more.
        """
        sandbox = added.sandbox
        info = {"": json.dumps({"sandboxMetadata": {"NetNSPath": added.netns_path}})}
        details = SandboxDetails(host_network=False, ips=sandbox.ips, info=info)
        found = await self._locate(details)
        before = self.current.get(sandbox.pod_uid)
        has_current = before is not None and (
            before.id == sandbox.id or (before.is_ready and not is_started)
        )
        if found.netns is None or has_current or sandbox.id in self._listed_ids:
            return
        sandbox = msgspec.structs.replace(
            sandbox,
            netns=found.netns,
            # It goes with its namespace, unless the runtime lists it.
            is_ready=False,
            # It must not be replaced by the one before, which may be listed longer.
            attempt=before.attempt + 1 if before else 0,
            created=datetime.datetime.now(datetime.UTC),
        )
        self.current[sandbox.pod_uid] = sandbox
        self.containers[sandbox.pod_uid] = ()
        _log_change(before, sandbox)
        self.changes.mark(sandbox.pod_uid)

    async def run(self) -> None:
        """Follow the runtime until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks.start(group, "cri-events", self._events.run)
                tasks.start(group, "networked sandboxes", self._follow_networked)
                while True:
                    await self._relist_once()
                    await self._wait()
        finally:
            await self._lookups.aclose()
            # Run again, it connects again.
            runtime, self._runtime = self._runtime, None
            if runtime is not None:
                await runtime.aclose()

    async def _follow_networked(self) -> None:
        def set_open(is_open: bool) -> None:
            self._reports_networked = is_open

        async def add(found: NetworkedSandbox) -> None:
            await self.add(found)
            added = self.current.get(found.sandbox.pod_uid)
            if added and added.id == found.sandbox.id and added.id not in self._listed_ids:
                # What the runtime itself has stored is what it would respond.
                self._lookups.add(added)

        await networked.follow(lambda: self._runtime, self._lookups.has, add, set_open)

    async def relist(self) -> None:
        """List once, and mark changes. Raises `CriError`; then nothing changes."""
        if self._runtime is None:
            self._runtime = await self._open_runtime()
        started = asyncio.get_running_loop().time()
        listed = await self._runtime.list_sandboxes()
        self._listed_ids = {sandbox.id for sandbox in listed}
        containers = await self._runtime.list_containers()
        await self._lookups.update(self._runtime, listed, containers)
        current = self._choose(listed)
        self._lookups.forget_others(
            {found.id for found in listed}, {found.id for found in containers}
        )
        self.relists += 1
        self.listed_at = started
        self._update(current, containers)
        seconds = (asyncio.get_running_loop().time() - started) * _GAP_PER_SECOND
        self._gap_seconds = min(max(seconds, _MIN_GAP_SECONDS), _MAX_GAP_SECONDS)

    async def _relist_once(self) -> None:
        problem = ""
        try:
            await self.relist()
        except CriError as error:
            problem = str(error)
            self._stuck_calls += isinstance(error, CriStuckError)
        else:
            self._stuck_calls = 0
        if problem and problem != self.problem:
            log.warning(Event.RUNTIME_UNREACHABLE, problem=problem)
        elif self.problem and not problem:
            log.info(Event.RUNTIME_REACHABLE, sandboxes=len(self.current))
        self.problem = problem
        if self.is_settled:
            self.listed.set()
        if self.relists < _COMPLETE_RELISTS and not problem:
            self.hint()

    async def _wait(self) -> None:
        """Wait for a hint, its echo, a lookup that is due again, or the poll interval."""
        seconds = _RELIST_WITH_EVENTS_SECONDS if self.has_events else _RELIST_SECONDS
        if self.problem:
            seconds = _RELIST_SECONDS
        if self._echoes:
            seconds = max(self._echoes.pop(0), self._gap_seconds)
        loop = asyncio.get_running_loop()
        end = min(loop.time() + seconds, self._lookups.next_retry_at)
        gap_end = min(loop.time() + self._gap_seconds, end)
        while True:
            # A timer's rounding must not make this a busy loop.
            now = loop.time() + _TICK_SECONDS
            if now >= end or (self._hinted.is_set() and now >= gap_end):
                break
            if self._runtime is not None and self._is_expected():
                if await self._lists_new(self._runtime):
                    return
            elif self._hinted.is_set():
                await asyncio.sleep(gap_end - loop.time())
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(end):
                        await self._hinted.wait()
        if self._hinted.is_set():
            self._hinted.clear()
            self._echoes = list(_ECHO_SECONDS)

    def _is_expected(self) -> bool:
        """Whether a sandbox may appear at any moment, of which no event reports. Not while the
        runtime cannot be reached, which would be tried again without a pause."""
        if self._reports_networked or self.problem:
            return False
        now = asyncio.get_running_loop().time()
        return now < self._hinted_at + _AWAITED_SECONDS and self._is_awaited()

    async def _lists_new(self, runtime: Runtime) -> bool:
        """Whether there is a ready sandbox that the last list did not have, after a short wait."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            listed = await runtime.list_sandboxes()
        except CriError:
            return True
        if any(sandbox.is_ready and sandbox.id not in self._listed_ids for sandbox in listed):
            return True
        took = loop.time() - started
        pause = max(_AWAITED_GAP_SECONDS, took * (1 / _AWAITED_SHARE - 1))
        await asyncio.sleep(min(pause, _MIN_GAP_SECONDS))
        return False

    def _choose(self, listed: Iterable[Sandbox]) -> dict[str, Sandbox]:
        """Each pod's current sandbox, of those that have been looked up."""
        chosen: dict[str, Sandbox] = {}
        for sandbox in listed:
            found = self._lookups.sandbox(sandbox.id)
            if found is None:
                continue
            candidate = msgspec.structs.replace(found, is_ready=sandbox.is_ready)
            best = chosen.get(candidate.pod_uid)
            if _is_alive(candidate) and (best is None or _rank(candidate) > _rank(best)):
                chosen[candidate.pod_uid] = candidate
        for uid, sandbox in self.current.items():
            kept = msgspec.structs.replace(sandbox, is_ready=False)
            best = chosen.get(uid)
            if _is_alive(kept) and (best is None or _rank(kept) > _rank(best)):
                chosen[uid] = kept
        return chosen

    def _update(self, current: dict[str, Sandbox], containers: Iterable[CriContainer]) -> None:
        before, self.current = self.current, current
        newest = self._newest(containers)
        for uid in before.keys() - current.keys():
            self.containers.pop(uid, None)
            log.info(Event.SANDBOX_REMOVED, pod=before[uid].full_name, sandbox=before[uid].id)
            self.changes.mark(uid)
        for uid, sandbox in current.items():
            found = newest.get(sandbox.id, ())
            is_new = sandbox != before.get(uid)
            if is_new:
                _log_change(before.get(uid), sandbox)
            if is_new or found != self.containers.get(uid):
                self.containers[uid] = found
                self.changes.mark(uid)

    def _newest(self, containers: Iterable[CriContainer]) -> dict[str, tuple[CriContainer, ...]]:
        """The newest container of each name, by sandbox, in the order of names."""
        found: dict[tuple[str, str], CriContainer] = {}
        for container in sorted(containers, key=_container_order):
            found[container.sandbox_id, container.name] = container
        grouped: dict[str, tuple[CriContainer, ...]] = {}
        for (sandbox_id, _), container in sorted(found.items()):
            started = self._lookups.started(container.id)
            container = msgspec.structs.replace(container, started=started)
            grouped[sandbox_id] = (*grouped.get(sandbox_id, ()), container)
        return grouped


def _is_alive(sandbox: Sandbox) -> bool:
    """Whether containers may run in it: it is ready, or its namespace exists."""
    return sandbox.is_ready or sandbox.has_netns


def _rank(sandbox: Sandbox) -> tuple[bool, int, float]:
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
        # Without a namespace while it is being stopped: expected.
        record = log.warning if sandbox.is_ready else log.info
        record(Event.SANDBOX_NETNS_MISSING, **facts, problem=sandbox.problem)
    elif before is None or before.id != sandbox.id:
        log.info(Event.SANDBOX_FOUND, **facts)
    elif not sandbox.is_ready:
        log.info(Event.SANDBOX_NOT_READY, **facts)
