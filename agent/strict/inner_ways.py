"""The way from inside a pod to its application, by which the relay connects: tried by connecting.

Rules of a mesh in the pod may redirect such connections to its proxy, and those of a firewall in it
may drop them, though they admit the kubelet's from outside (`probes/redirection.py`). The
relay then connects as the proxy's user, if the rules exempt it; where they do not, the pod stays at
enforce. A pod's rules change without a message: an init container adds them after the pod has its
gate. While a pod has no rules at all, the kernel compares that (`agent.strict.hookless_pods`), and
the pod is tried as soon as it gets some. Where it does not, or a pod has rules, each pod that has
the relay, or is to get it, is tried every few seconds. The others that are gated are tried less
often: `kubectl podgate strict` shows what strict would make of them.

Rules of single ports are found by podgate's probes, which look up who accepts them.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable

import structlog

from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.strict import hookless_pods
from agent.strict.hookless_pods import HooklessPods
from bpf.errors import CompileError
from bpf.verdicts import Mode
from probes import redirection
from probes.netns import Netns, NetnsError
from probes.redirection import Dropped, InnerTries, InnerWay, InnerWays

log = structlog.get_logger(__name__)

# 25 us for each address; the kubelet needs three failures, by default in 30 s, to restart a pod.
_PERIOD_SECONDS = 5.0
_OTHERS_SECONDS = 30.0
# What the kernel compares, for what is no hook: routes, and rules for them.
_HOOKLESS_SECONDS = 300.0
# Until what a start has to do is done.
_START_SECONDS = 10.0
# Some pods, since each turn of the event loop costs as much as a third of one.
_TURN_SECONDS = 0.001

Probed = Callable[[Netns, Iterable[str]], InnerWays]
Find = Callable[[Netns, Iterable[str], InnerWays], InnerTries]
FindDropped = Callable[[Netns, Iterable[str]], dict[str, InnerWay]]
OpenHookless = Callable[[Callable[[set[str]], None]], Awaitable[HooklessPods]]


@dataclasses.dataclass(slots=True)
class _Tried:
    """What a connection to an unused port of each address of a pod has found."""

    state: PodState
    netns: Netns
    is_new: bool
    probed: InnerWays
    """What probes have found, of single ports."""
    ways: dict[str, InnerWay]
    silent: list[str]
    """Addresses that did not answer at once."""


class InnerWayWatch:
    """Writes `inner_ways` of pods' states, and marks what changes. To be created on the loop."""

    def __init__(
        self,
        store: PodStore,
        *,
        has_need: Callable[[PodState], object],
        probed: Probed,
        find: Find = redirection.find_inner_ways,
        find_dropped: FindDropped = redirection.find_dropped,
        open_hookless: OpenHookless = hookless_pods.load,
    ) -> None:
        """has_need: whether a pod in enforce has the relay; probed: what probes have found of a
        pod's addresses; find: what a connection to an unused port finds; find_dropped: of addresses
        that do not answer it at once; open_hookless: raises `CompileError` and `OSError`."""
        self._store = store
        self._has_need = has_need
        self._probed = probed
        self._find = find
        self._find_dropped = find_dropped
        self._open_hookless = open_hookless
        self._hookless: HooklessPods | None = None
        self._others_at = 0.0
        """When all are tried that are not hookless."""
        self._hooked: set[str] = set()
        """The uids of pods that were hookless until now."""
        self._wake = asyncio.Event()
        self._changes = store.in_force.subscribe(Subscription(self._wake))
        self._tried: dict[str, tuple[Netns, tuple[str, ...], bool]] = {}
        """By uid: of which sandbox and addresses, and whether it had the relay."""
        self._found: dict[str, dict[str, InnerWay]] = {}
        """By uid, without what probes have found."""

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            comparison = group.create_task(self._compare_hooks(), name="inner-ways-hooks")
            try:
                await self._try_again_and_again()
            finally:
                comparison.cancel()
                if self._hookless:
                    self._hookless.close()
                    self._hookless = None

    async def _compare_hooks(self) -> None:
        await asyncio.sleep(_START_SECONDS)
        with contextlib.suppress(OSError, CompileError):
            self._hookless = await self._open_hookless(self._handle_hooked)
            # All are inspected with those that are tried next.
            self._others_at = 0.0

    async def _try_again_and_again(self) -> None:
        loop = asyncio.get_running_loop()
        hookless_at = 0.0
        while True:
            now = loop.time()
            is_for_others, is_for_hookless = now >= self._others_at, now >= hookless_at
            if is_for_others:
                self._others_at = now + _OTHERS_SECONDS
            if is_for_hookless:
                hookless_at = now + _HOOKLESS_SECONDS
            due = [
                uid
                for uid, state in self._store.pods.items()
                if (is_for_others or self._is_relayed(state))
                and (is_for_hookless or not self._is_hookless(uid, state))
            ]
            await self._try_all(due, inspects_hooks=is_for_others)
            if self._hookless:
                self._hookless.compare()
            due_at = loop.time() + _PERIOD_SECONDS
            while loop.time() < due_at:
                try:
                    async with asyncio.timeout_at(due_at):
                        await self._wake.wait()
                except TimeoutError:
                    break
                self._wake.clear()
                await self._try_all(uid for uid in self._changes.take() if self._is_new(uid))
                hooked, self._hooked = self._hooked, set()
                await self._try_all(hooked)

    def _handle_hooked(self, uids: set[str]) -> None:
        self._hooked |= uids
        self._wake.set()

    def _is_hookless(self, uid: str, state: PodState) -> bool:
        """Whether nothing is known that could be between the relay and this pod's servers."""
        return (
            self._hookless is not None
            and uid in self._hookless
            and not state.inner_ways
            and state.netns is not None
            and not self._probed(state.netns, state.own_addresses)
        )

    def _is_new(self, uid: str) -> bool:
        state = self._store.get(uid)
        if state is None:
            return True
        before = self._tried.get(uid)
        is_same = before == (state.netns, state.own_addresses, self._is_relayed(state))
        return not is_same or state.inner_ways is None

    async def _try_all(self, uids: Iterable[str], *, inspects_hooks: bool = False) -> None:
        silent = []
        began = time.monotonic()
        for uid in list(uids):
            tried = self._try(uid)
            if tried and tried.silent:
                silent.append(tried)
            elif tried:
                self._conclude(tried, inspects_hooks)
            if time.monotonic() - began > _TURN_SECONDS:
                # Others of the loop come now.
                await asyncio.sleep(0)
                began = time.monotonic()
        for tried in silent:
            # Waits where something is dropped, so it runs beside the loop. The machine may only be
            # busy: meanwhile the relay keeps a pod that it has, and does not get a new one.
            try:
                tried.ways |= await asyncio.to_thread(self._find_dropped, tried.netns, tried.silent)
            except (NetnsError, OSError):
                self._keep(tried.state)
            else:
                self._conclude(tried, inspects_hooks)

    def _try(self, uid: str) -> _Tried | None:
        """None if it is not to be tried, or cannot be."""
        state = self._store.get(uid)
        if state is None or state.netns is None or state.pod.mode is Mode.OFF:
            self._tried.pop(uid, None)
            self._found.pop(uid, None)
            if self._hookless:
                self._hookless.forget(uid)
            self._set(uid, state, None)
            return None
        is_new = self._is_new(uid)
        netns, addresses = state.netns, state.own_addresses
        if uid in self._tried and self._tried[uid][0] != netns:
            self._set(uid, state, None)
        self._tried[uid] = (netns, addresses, self._is_relayed(state))
        probed = self._probed(netns, addresses)
        try:
            tries = self._find(netns, addresses, self._found.get(uid, {}))
        except (NetnsError, OSError):
            self._keep(state)
            return None
        return _Tried(state, netns, is_new, probed, tries.ways, tries.silent)

    def _keep(self, state: PodState) -> None:
        """It ends, or this process lacks descriptors, which shows nothing."""
        self._set(state.pod.uid, state, state.inner_ways or {})

    def _conclude(self, tried: _Tried, inspects_hooks: bool) -> None:
        uid = tried.state.pod.uid
        if self._store.get(uid) is not tried.state or tried.state.netns != tried.netns:
            return
        self._found[uid] = tried.ways
        self._set(uid, tried.state, _merged(tried.ways, tried.probed))
        if self._hookless and (tried.is_new or inspects_hooks):
            with contextlib.suppress(NetnsError, OSError):
                self._hookless.inspect(uid, tried.netns)

    def _set(self, uid: str, state: PodState | None, found: InnerWays | None) -> None:
        if state is None or found == state.inner_ways:
            return
        was_tried = state.inner_ways is not None
        state.inner_ways = found
        for address, way in (found or {}).items():
            is_problem = way.user is None and self._is_relayed(state)
            warn = log.warning if is_problem else log.info
            pod, obstacle = state.pod.full_name, way.redirection
            if not isinstance(obstacle, Dropped):
                warn(
                    Event.POD_REDIRECTED,
                    pod=pod,
                    address=address,
                    port=obstacle.port,
                    mesh=obstacle.mesh,
                    exempt_user=way.user,
                )
            else:
                warn(Event.POD_DROPS_INSIDE, pod=pod, address=address, port=obstacle.port)
        # Most pods have none, nor the relay, and are tried first when they start.
        if found or was_tried or self._is_relayed(state):
            self._store.in_force.mark(uid)

    def _is_relayed(self, state: PodState) -> bool:
        if state.pod.host_network or not state.pod.is_relayed:
            return False
        return state.pod.mode is Mode.STRICT or bool(self._has_need(state))


def _merged(found: InnerWays, probed: InnerWays) -> dict[str, InnerWay]:
    """By address; one for which no user is exempt comes first."""
    made = dict(found)
    for address, way in probed.items():
        if address not in made or way.user is None:
            made[address] = way
    return made
