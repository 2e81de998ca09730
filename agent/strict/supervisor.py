"""Keeps a relay for the pods in strict: starts it, tells it what to carry, replaces it.

Level-triggered like the reconciler: a hint means that what is wanted is made up anew and told
whole. Whatever becomes of a relay, the kubelet's next connect goes to the pod itself, where the
gate admits it as in enforce: so nothing here is ever waited for by a pod.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import structlog

from agent.backoff import Backoff, no_jitter
from agent.pods.changes import Subscription
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.relay import messages
from agent.strict import targets as relay_targets
from agent.strict.launcher import Launched
from agent.strict.process import RelayError
from agent.strict.stats import ConnectionStats
from agent.strict.targets import Plan

log = structlog.get_logger(__name__)

# Pods come and change in bursts.
_DEBOUNCE_SECONDS = 0.05
_LOOK_SECONDS, _LOOK_SLACK_SECONDS = 1.0, 0.1
# A relay reports once a second. Looks are counted, not seconds: when this process was held up, its
# relay was not.
_LOOKS_WITHOUT_REPORT = 3
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 30.0
_HEALTHY_SECONDS = 60.0
# A pod that is replaced comes back at once.
_IDLE_SECONDS = 60.0
# Probes end within seconds; a hook's connection may be idle, and its client opens another.
_DRAIN_SECONDS = 30.0
# What released itself, and is still there so long after its drain, hangs.
_OVERDUE_SECONDS = 10.0
_ROUTES_SECONDS = 30.0

_STARTING = "the relay is starting"


class Launching(Protocol):
    """Where relays come from: `agent.strict.launcher.Launcher`."""

    async def look(self) -> None: ...

    async def ensure_ranges(self) -> None: ...

    async def launch(
        self, on_report: Callable[[messages.RelayReport], None], on_end: Callable[[], None]
    ) -> Launched: ...


@dataclasses.dataclass(slots=True)
class _Serving:
    """The relay that carries now, and what it said it has."""

    relay: Launched
    since: float
    revision: int = 0
    told: tuple[messages.RelayTargetSpec, ...] | None = None
    standing: dict[str, messages.RelayTargetSpec] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reports: int = 0
    looks: int = 0
    """Without a report."""
    looked_at: float = 0.0

    async def tell(self, targets: tuple[messages.RelayTargetSpec, ...]) -> None:
        """Raises `RelayError`."""
        self.told = None
        self.revision += 1
        question = messages.SetTargets(self.revision, targets)
        have = await self.relay.conversation.ask(question, messages.TargetsApplied)
        if have.revision != self.revision:
            raise RelayError(f"it has revision {have.revision}, not {self.revision}")
        self.told = targets
        self.refused = have.rejected
        self.standing = {each.key: each for each in targets if each.key not in have.rejected}

    def is_silent(self, now: float) -> bool:
        """To be asked at each look; several within a second are one."""
        if now - self.looked_at < _LOOK_SECONDS - _LOOK_SLACK_SECONDS:
            return False
        self.looked_at = now
        reports = self.relay.conversation.reports
        self.looks = 0 if reports > self.reports else self.looks + 1
        self.reports = reports
        return self.looks >= _LOOKS_WITHOUT_REPORT


class Relaying:
    """All relays of one agent. To be made on the running loop."""

    def __init__(
        self,
        launcher: Launching,
        *,
        is_default: bool,
        store: PodStore,
        stats: ConnectionStats,
    ) -> None:
        """is_default: whether strict is the node's mode, so that a relay exists before pods do;
        store: pods of which `why_not` changed are marked there; stats: gets the relays' reports."""
        self._launcher = launcher
        self._is_default = is_default
        self._store = store
        self._stats = stats
        self._now = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._changes = Subscription(self._wake)
        store.desired.subscribe(self._changes)
        store.in_force.subscribe(self._changes)
        self._serving: _Serving | None = None
        self._released: dict[Launched, float] = {}
        """Relays that carry what they began, and when they are overdue."""
        self._reports: dict[int, messages.RelayReport] = {}
        self._plan = Plan((), {})
        self._trouble = _STARTING
        """Why no relay serves; for as long as that is so."""
        self._retry = Backoff(
            base_seconds=_RETRY_SECONDS, cap_seconds=_MAX_RETRY_SECONDS, jitter=no_jitter
        )
        self._retry_at = 0.0
        self._idle_since: float | None = None
        self._routes_at = 0.0
        self._asked: list[asyncio.Future[None]] = []
        self._said: dict[str, str | None] = {}
        """What `why_not` said last, by pod's uid."""
        self._launches = 0

    @property
    def restarts(self) -> int:
        """How often a relay was started, or tried to be, in another's place."""
        return max(0, self._launches - 1)

    @property
    def is_up(self) -> bool:
        """Whether a relay serves."""
        return self._serving is not None and self._serving.relay.conversation.problem is None

    @property
    def trouble(self) -> str:
        """Why none does; empty while one does, or nobody wants one."""
        return "" if self.is_up or not self._is_wanted() else _sentence(self._trouble)

    @property
    def last_reports(self) -> Collection[messages.RelayReport]:
        """The newest of each relay that lives."""
        return self._reports.values()

    def why_not(self, guarded: PodState) -> str | None:
        """One sentence about why the kubelet comes to this pod by the gate; None: it does not."""
        why = self._said[guarded.pod.uid] = self._why_not(guarded)
        return why

    def _why_not(self, guarded: PodState) -> str | None:
        if (never := relay_targets.why_never(guarded)) is not None:
            return never
        wanted = relay_targets.wanted_targets(guarded)
        if not wanted:
            return None  # the kubelet has nothing to ask of it
        if shared := self._plan.shared.get(guarded.pod.uid):
            return shared
        if self._serving is None or not self.is_up:
            return _sentence(self._trouble)
        for target in wanted:
            if refusal := self._serving.refused.get(target.key):
                return _sentence(f"the relay refuses {target.address}: {refusal}")
            if self._serving.standing.get(target.key) != target:
                return "the relay has still to hear of this pod."
        return None

    async def restart(self) -> None:
        """Have another relay take over, and wait until it has. Raises `RelayError`."""
        if not self._is_wanted():
            raise RelayError("no relay runs, since no pod is in strict")
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._wake.set()
        await asked

    async def run(self) -> None:
        """Until cancelled: then the relay is released, and carries on what it began."""
        try:
            while True:
                self._plan = relay_targets.plan_of(self._store.states())
                await self._step()
                self._publish()
                await self._wait()
        finally:
            self._leave()

    async def _wait(self) -> None:
        is_idle = self._serving is None and not self._is_wanted() and not self._released
        try:
            async with asyncio.timeout(None if is_idle else _LOOK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_DEBOUNCE_SECONDS)
        self._wake.clear()
        self._changes.take()

    async def _step(self) -> None:
        """One look; bring what is there nearer to what is wanted."""
        await self._launcher.look()
        await self._end_overdue()
        if self._serving is not None and (problem := self._problem(self._serving)):
            await self._give_up(problem)
        if self._serving is None and not self._is_wanted():
            self._answer(RelayError("no relay runs, since no pod is in strict"))
            return
        if self._serving is None:
            if self._now() >= self._retry_at:
                await self._start()
        elif self._asked:
            await self._hand_over(self._serving)
        if self._serving is not None:
            await self._keep(self._serving)

    def _problem(self, serving: _Serving) -> str | None:
        if (problem := serving.relay.conversation.problem) is not None:
            return f"the relay failed: {problem}"
        if serving.is_silent(self._now()):
            return "the relay does not answer"
        return None

    async def _keep(self, serving: _Serving) -> None:
        """Tell it what has changed; release it when nobody has wanted it for a while."""
        if self._now() - serving.since >= _HEALTHY_SECONDS:
            self._retry.reset()
        try:
            if self._now() >= self._routes_at:
                self._routes_at = self._now() + _ROUTES_SECONDS
                await self._launcher.ensure_ranges()
            if serving.told != self._plan.targets:
                await serving.tell(self._plan.targets)
        except RelayError as error:
            await self._give_up(f"the relay failed: {error}")
            return
        if self._is_wanted():
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._now()
        elif self._now() - self._idle_since >= _IDLE_SECONDS:
            log.info("relay released: no pod is in strict")
            self._serving = None
            self._trouble = _STARTING
            self._release(serving.relay)

    async def _start(self) -> None:
        try:
            self._serving = await self._bring_up()
        except RelayError as error:
            self._fail(f"the relay cannot be started: {error}")
            self._answer(error)
        else:
            self._answer(None)

    async def _hand_over(self, serving: _Serving) -> None:
        """From one relay to another, with no connect in between that neither takes."""
        try:
            self._serving = await self._bring_up()
        except RelayError as error:
            log.error("hand-over failed; the relay stays", error=str(error))
            # Half of what it has may be the other's by now.
            serving.told = None
            self._answer(error)
            return
        self._release(serving.relay)
        self._answer(None)

    async def _bring_up(self) -> _Serving:
        """Another relay that has all and is engaged. Raises `RelayError`."""
        self._launches += 1
        relay: Launched | None = None

        def report(received: messages.RelayReport) -> None:
            if relay is not None:
                self._reports[id(relay)] = received
            self._stats.keep_only(self._store.pods)
            self._stats.add(received.samples)

        relay = await self._launcher.launch(report, self._wake.set)
        try:
            serving = _Serving(relay, self._now())
            await serving.tell(self._plan.targets)
            await relay.conversation.ask(messages.Engage(), messages.Engaged)
        except BaseException:
            await self._kill(relay)
            raise
        log.info("relay engaged", targets=len(serving.standing), refused=len(serving.refused))
        return serving

    def _release(self, relay: Launched) -> None:
        relay.conversation.tell(messages.Release(_DRAIN_SECONDS))
        self._released[relay] = self._now() + _DRAIN_SECONDS + _OVERDUE_SECONDS

    async def _end_overdue(self) -> None:
        for relay, overdue_at in list(self._released.items()):
            if relay.conversation.problem is not None or self._now() >= overdue_at:
                del self._released[relay]
                await self._kill(relay)

    async def _give_up(self, problem: str) -> None:
        assert self._serving is not None
        relay, since = self._serving.relay, self._serving.since
        self._serving = None
        if self._now() - since >= _HEALTHY_SECONDS:
            self._retry.reset()
        self._fail(problem)
        self._publish()
        await self._kill(relay)

    def _fail(self, problem: str) -> None:
        delay = self._retry.next_seconds()
        if problem != self._trouble:
            log.error("pods in strict are enforced only", reason=problem, again_in=delay)
        self._trouble = problem
        self._retry_at = self._now() + delay

    async def _kill(self, relay: Launched) -> None:
        self._reports.pop(id(relay), None)
        await relay.kill()

    def _leave(self) -> None:
        if self._serving is not None:
            self._serving.relay.conversation.tell(messages.Release(_DRAIN_SECONDS))
            self._released[self._serving.relay] = 0.0
        for relay in self._released:
            relay.leave()
        self._answer(RelayError("the agent ends"))

    def _answer(self, error: RelayError | None) -> None:
        for asked in self._asked:
            if asked.done():
                continue
            if error is None:
                asked.set_result(None)
            else:
                asked.set_exception(error)
        self._asked.clear()

    def _is_wanted(self) -> bool:
        return bool(self._plan.targets) or self._is_default

    def _publish(self) -> None:
        """Tell of the pods of which there is something else to say."""
        pods = {guarded.pod.uid: guarded for guarded in self._store.states()}
        for uid, said in list(self._said.items()):
            if uid not in pods:
                del self._said[uid]
            elif self._why_not(pods[uid]) != said:
                self._store.in_force.mark(uid)


def _sentence(text: str) -> str:
    return f"{text.rstrip('.')}."
