"""Supervises the relay: starts it, sets its targets, replaces it on failure.

It proxies the kubelet's connections to pods in strict, and to those in enforce that the kubelet
cannot reach.

Level-triggered: each change of a pod plans its targets again. Those that differ are sent, and all
every half minute. Whatever happens to a relay, the kubelet's next connect goes directly to the pod,
where the gate admits it as in enforce (unless `--strict-without-fallback`). So no pod ever waits
for this module.
A relay continues without its agent, and the next agent's relay takes over from it.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import structlog

from agent import tasks
from agent.backoff import Backoff, no_jitter
from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.probing.answered_probes import AnsweredProbes
from agent.relay import messages
from agent.strict.active_relay import CHECK_SECONDS, ActiveRelay, blocked
from agent.strict.launcher import RelayHandle
from agent.strict.plans import RelayPlans
from agent.strict.predecessors import Predecessors
from agent.strict.process import RelayError
from agent.strict.relayed_pods import RelayedPods, sentence
from agent.strict.stats import ConnectionStats
from agent.strict.verdicts import VerdictUpdates
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)

# Pods come and change in bursts.
_DEBOUNCE_SECONDS = 0.05
# All is as before ten seconds after the end of what prevented a relay.
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 8.0
_HEALTHY_SECONDS = 60.0
# A pod that is replaced comes back at once.
_IDLE_SECONDS = 60.0
_ROUTES_SECONDS = 30.0
# A relay gets what changed, and so often everything: a redirect that it lost (two relays wrote at
# the same moment, another program deleted it) is then back. For 100 pods the message costs 0.2 ms.
_WHOLE_SECONDS = 30.0
# Targets are planned as pods change; so often those of all pods, which costs 5 ms for 100 pods.
_PLAN_SECONDS = 30.0

# This and twice the time for a response, within one period of the shortest probe.
_WAY_SECONDS = 0.5

_STARTING = "the relay is starting"
_NOT_NEEDED = "no relay runs, since no pod is in strict"


class RelayLauncher(Protocol):
    """Starts relays: `agent.strict.launcher.ProcessLauncher`."""

    async def check(self) -> None: ...

    async def find_predecessors(self, now: Callable[[], float]) -> Predecessors: ...

    def redirected(self) -> set[str]: ...

    async def ensure_ranges(self) -> None: ...

    async def launch(self, stats: ConnectionStats, wake: asyncio.Event) -> RelayHandle: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Idle:
    """No relay runs: none is needed, or the first one is not started yet."""

    problem = _STARTING


@dataclasses.dataclass(frozen=True, slots=True)
class _Starting:
    """A relay is being started. problem: of the state before."""

    problem: str


@dataclasses.dataclass(frozen=True, slots=True)
class _BackingOff:
    """The relay failed, or cannot be started."""

    problem: str
    retry_at: float


class RelaySupervisor:
    """All relays of one agent. To be created on the running loop."""

    def __init__(
        self,
        launcher: RelayLauncher,
        *,
        modes: PodModes,
        store: PodStore,
        stats: ConnectionStats,
        answered: AnsweredProbes,
        has_fallback: bool = True,
        https_hooks: bool = True,
    ) -> None:
        """answered: the probes that relays answer; modes: where strict is the node's default, a
        relay runs before there are pods, and with a ceiling below strict pods in enforce have none;
        has_fallback: whether gates of pods in strict admit the kubelet while no relay serves;
        https_hooks: the feature gate PodLifecycleHTTPS; stats: gets the relays' reports."""
        self.has_fallback = has_fallback
        self._launcher = launcher
        self._modes = modes
        self._store = store
        self._stats = stats
        self._now = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._used = asyncio.Event()
        """Set when another relay serves."""
        self._changes = Subscription(self._wake)
        store.desired.subscribe(self._changes)
        store.in_force.subscribe(self._changes)
        modes.changes.subscribe(self._changes)
        answered.plans.subscribe(self._changes)
        self.verdicts = VerdictUpdates(answered, lambda: self._active)
        self._state: _Idle | _Starting | _BackingOff | ActiveRelay = _Idle()
        self._released: dict[RelayHandle, float] = {}
        """Relays that drain their connections, and when they are overdue."""
        self._predecessors = Predecessors((), have_these_maps=True, now=self._now)
        self.pods = RelayedPods(store, self._serving)
        """What their conditions show of the relay, with the newest plan."""
        self._plans = RelayPlans(answered.answers, https_hooks=https_hooks)
        self._all_planned_at = float("-inf")
        self._changed: set[str] = set()
        """Pods to plan again, and those whose answers may be others."""
        self._backoff = Backoff(
            base_seconds=_FIRST_RETRY_SECONDS, cap_seconds=_MAX_RETRY_SECONDS, jitter=no_jitter
        )
        self._restart_requests: list[asyncio.Future[None]] = []
        self._logged_problem = ""
        self._launches = 0

    @property
    def restarts(self) -> int:
        """Number of relay starts after the first, successful or not."""
        return max(0, self._launches - 1)

    @property
    def _active(self) -> ActiveRelay | None:
        return self._state if isinstance(self._state, ActiveRelay) else None

    def _serving(self) -> ActiveRelay | str:
        """The relay that serves, or why none does."""
        if isinstance(self._state, ActiveRelay) and not self._state.problem:
            return self._state
        return sentence(self._state.problem)

    @property
    def is_up(self) -> bool:
        """Whether a relay serves."""
        return isinstance(self._serving(), ActiveRelay)

    @property
    def problem(self) -> str:
        """Why no relay serves; empty while one does, or none is needed."""
        return "" if self.is_up or not self.is_needed else sentence(self._state.problem)

    @property
    def last_reports(self) -> Collection[messages.RelayReport]:
        """The newest report of each running relay."""
        return [report for relay in self._relays() if (report := relay.channel.last_report)]

    async def restart(self) -> None:
        """Replace the relay, and wait until the new one serves. Raises `RelayError`."""
        if not self.is_needed:
            raise RelayError(_NOT_NEEDED)
        request: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._restart_requests.append(request)
        self._wake.set()
        await request

    async def run(self) -> None:
        """Until cancelled: then the relay continues without this agent."""
        is_woken = True
        self._all_planned_at = float("-inf")
        self._predecessors = await self._launcher.find_predecessors(self._now)
        try:
            async with asyncio.TaskGroup() as group:
                tasks.start(group, "relay-way", self._watch_way)
                while True:
                    is_for_all = self._now() >= self._all_planned_at + _PLAN_SECONDS
                    if is_woken or is_for_all:
                        self._make_plan(is_for_all=is_for_all)
                    before = self._state
                    await self._reconcile()
                    if is_for_all:
                        self._stats.keep_only(self._store.pods)
                    if is_for_all or self._state is not before:
                        self.pods.publish_all()
                    else:
                        self.pods.publish(self._changed)
                    self._changed.clear()
                    is_woken = await self._wait()
        finally:
            self._release_all()

    async def _watch_way(self) -> None:
        """Try the way to the relay that serves, again and again."""
        while True:
            if (serving := self._active) and not serving.problem:
                serving.way_problem = await serving.relay.find_way_problem(is_engaged=True)
                if serving.way_problem:
                    self._wake.set()
            else:
                await self._used.wait()
                self._used.clear()
            await tasks.tick(_WAY_SECONDS)

    def _make_plan(self, *, is_for_all: bool) -> None:
        if is_for_all:
            self._all_planned_at = self._now()
        self._changed |= self._plans.update(
            self._store.pods,
            None if is_for_all else self._changed,
            proxies_enforced=self._modes.node.ceiling is Mode.STRICT,
        )
        self.pods.plan = self._plans.current

    async def _wait(self) -> bool:
        """Until something changed, or for a check of the relay; whether something changed."""
        is_idle = not isinstance(self._state, ActiveRelay) and not self.is_needed
        try:
            has_relays = bool(self._released) or bool(self._predecessors)
            is_watching = not is_idle or has_relays
            async with asyncio.timeout_at(tasks.next_tick(CHECK_SECONDS) if is_watching else None):
                await self._wake.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(_DEBOUNCE_SECONDS)
        self._wake.clear()
        self._changed.update(self._changes.take())
        return True

    async def _reconcile(self) -> None:
        """One pass towards the desired state."""
        await self._launcher.check()
        await self._kill_overdue()
        if self._store.synced.is_set():
            self._predecessors.note_synced()
        state = self._state
        if isinstance(state, ActiveRelay) and (problem := self._failure_of(state)):
            await self._abandon(state, problem)
        if isinstance(self._state, ActiveRelay):
            if self._restart_requests:
                await self._hand_over(self._state)
        elif not self.is_needed:
            self._resolve_restarts(RelayError(_NOT_NEEDED))
        elif self._may_start():
            await self._start()
        if isinstance(self._state, ActiveRelay):
            await self._maintain(self._state)
        self._predecessors.release(
            is_replaced=isinstance(self._state, ActiveRelay),
            is_needed=self.is_needed,
            is_off=self._modes.node.is_off,
        )

    def _may_start(self) -> bool:
        if isinstance(self._state, _BackingOff) and self._now() < self._state.retry_at:
            return False
        targets = self.pods.plan.targets
        return self._predecessors.may_be_replaced(targets, self._launcher.redirected)

    def _failure_of(self, serving: ActiveRelay) -> str:
        if not serving.problem and serving.is_silent(self._now()):
            return "the relay does not respond"
        return serving.problem

    async def _maintain(self, serving: ActiveRelay) -> None:
        """Update the relay; release it when it was not needed for a while."""
        if self._now() - serving.since >= _HEALTHY_SECONDS:
            self._backoff.reset()
        try:
            if self._now() >= serving.routes_due_at:
                serving.routes_due_at = self._now() + _ROUTES_SECONDS
                await self._launcher.ensure_ranges()
            is_whole = self._now() >= serving.whole_due_at
            if is_whole:
                serving.whole_due_at = self._now() + _WHOLE_SECONDS
                serving.applied_targets = None
            if serving.applied_targets != self.pods.plan.targets:
                changed = await serving.set_targets(self.pods.plan.targets)
                self._changed |= changed
                if is_whole:
                    self.verdicts.send_all(serving)
                else:
                    self.verdicts.send(serving, changed)
        except RelayError as error:
            await self._abandon(serving, f"the relay failed: {error}")
            return
        if self.is_needed:
            serving.unneeded_since = None
            return
        if serving.unneeded_since is None:
            serving.unneeded_since = self._now()
        idle_seconds = 0.0 if self._modes.node.is_off else _IDLE_SECONDS
        if self._now() - serving.unneeded_since >= idle_seconds:
            log.info(Event.RELAY_RELEASED)
            self._state = _Idle()
            self._logged_problem = ""
            self._release(serving.relay)

    async def _start(self) -> None:
        self._state = _Starting(self._state.problem)
        try:
            self._use(await self._start_relay())
        except RelayError as error:
            self._back_off(f"the relay cannot be started: {error}")
            self._resolve_restarts(error)
        else:
            self._resolve_restarts(None)

    async def _hand_over(self, serving: ActiveRelay) -> None:
        """From one relay to the next; each connect meanwhile reaches one of them."""
        try:
            self._use(await self._start_relay())
        except RelayError as error:
            log.error(Event.RELAY_HANDOVER_FAILED, error=str(error))
            # The new relay may already have replaced some of its redirects.
            serving.applied_targets = None
            self._resolve_restarts(error)
            return
        self._release(serving.relay)
        self._resolve_restarts(None)

    async def _start_relay(self) -> ActiveRelay:
        """Another relay, with all targets, engaged. Raises `RelayError`."""
        self._launches += 1
        relay = await self._launcher.launch(self._stats, self._wake)
        has_targets = False
        try:
            # The relay before redirects connections to this one from `set_targets` on.
            if problem := await relay.find_way_problem(is_engaged=False):
                raise RelayError(blocked(problem))
            now = self._now()
            serving = ActiveRelay(relay, since=now, whole_due_at=now + _WHOLE_SECONDS)
            has_targets = True
            await serving.set_targets(self.pods.plan.targets)
            self.verdicts.send_all(serving)
            await relay.channel.request(messages.Engage(), messages.Engaged)
        except BaseException:
            await relay.kill()
            if has_targets:
                # Their hooks redirect to the killed relay, and nothing gives them their targets.
                self._predecessors.release_all()
            raise
        log.info(
            Event.RELAY_ENGAGED,
            targets=len(serving.active_targets),
            rejected_targets=len(serving.rejected),
        )
        return serving

    def _use(self, serving: ActiveRelay) -> None:
        self._state = serving
        self._used.set()
        # Those that changed while it started.
        self.verdicts.send_all(serving)

    def _release(self, relay: RelayHandle) -> None:
        relay.channel.send(messages.Release(messages.DRAIN_SECONDS))
        self._released[relay] = self._now() + messages.OVERDUE_SECONDS

    async def _kill_overdue(self) -> None:
        for relay, overdue_at in list(self._released.items()):
            if relay.channel.problem is not None or self._now() >= overdue_at:
                del self._released[relay]
                await self._kill(relay)
        await self._predecessors.kill_overdue()

    async def _abandon(self, serving: ActiveRelay, problem: str) -> None:
        is_blocked = bool(serving.way_problem) and serving.relay.channel.problem is None
        if is_blocked:
            # It works, and open connections may be among those that a firewall admits.
            self._release(serving.relay)
        # Pods of a mesh reject the kubelet until the next relay serves.
        self._back_off(problem, is_first=not is_blocked and self._backoff.failures == 0)
        self.pods.publish_all()
        if not is_blocked:
            await self._kill(serving.relay)

    async def _kill(self, relay: RelayHandle) -> None:
        """Also unpin what was attached to its interface: no other pass may follow for hours."""
        await relay.kill()
        await self._launcher.check()

    def _back_off(self, problem: str, *, is_first: bool = False) -> None:
        """is_first: no failure came before, so the next relay starts at once."""
        seconds = self._backoff.next_seconds()
        if is_first:
            seconds = 0.0
        if problem != self._logged_problem:
            log.error(Event.STRICT_UNAVAILABLE, problem=problem, retry_seconds=seconds)
        self._logged_problem = problem
        self._state = _BackingOff(problem, self._now() + seconds)

    def _release_all(self) -> None:
        """Let all relays continue, since the agent stops: one serves, others drain."""
        for relay in self._relays():
            relay.release()
        self._predecessors.forget()
        self._resolve_restarts(RelayError("the agent is stopping"))

    def _relays(self) -> Iterator[RelayHandle]:
        if isinstance(self._state, ActiveRelay):
            yield self._state.relay
        yield from self._released

    def _resolve_restarts(self, error: RelayError | None) -> None:
        for request in self._restart_requests:
            with contextlib.suppress(asyncio.InvalidStateError):  # its caller was cancelled
                if error is None:
                    request.set_result(None)
                else:
                    request.set_exception(error)
        self._restart_requests.clear()

    @property
    def is_needed(self) -> bool:
        """Whether a pod of this node has a relay, or would get one."""
        return bool(self.pods.plan.targets) or self._modes.default is Mode.STRICT
