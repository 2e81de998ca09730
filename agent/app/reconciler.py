"""Keeps every pod guarded and probed: hints mark pods, one loop brings marked pods up to date.

Level-triggered: a pass reads what is there and makes it what is wanted, so a lost or doubled hint
costs time, never correctness.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable

import structlog

from agent import labels
from agent.gates.address_claims import AddressAuthority
from agent.gates.chain_order import ChainOrder
from agent.gates.path_test import PathTester
from agent.gates.pod_gates import ENFORCED, PodGates
from agent.gates.worker import GateWorker
from agent.linux.pod_network import NetworkReader
from agent.metrics import Metrics
from agent.pods.conditions import FALSE, Conditions
from agent.pods.pod import Pod
from agent.pods.pod_state import Admission, GracePeriod, IsolationStatus, PodState
from agent.probing.manager import ProbeManager
from agent.strict.targets import wants_strict
from bpf.errors import AttachError
from probes.netns import Netns

log = structlog.get_logger(__name__)

# What waits (for a namespace, an interface, a lock) is tried again this often without a hint.
_RETRY_SECONDS = 1.0
# In a pass over many pods; the last are told at its end.
_TELL_SECONDS = 0.2


class Reconciler:
    """All pods of this node."""

    def __init__(
        self,
        *,
        gate_worker: GateWorker,
        reader: NetworkReader,
        conditions: Conditions,
        probing: ProbeManager,
        metrics: Metrics,
        resync_seconds: float,
        admit: Callable[[Pod], Awaitable[Admission]],
        on_gated: Callable[[set[int]], Awaitable[None]],
        on_change: Callable[[], None],
        why_not_strict: Callable[[PodState], str | None],
        other_gates: Callable[[], Iterable[int]],
        unready_because: Callable[[], str | None],
        on_first_gate: Callable[[Pod], None],
        on_gate_lost: Callable[[Pod, str], None],
        on_unconfirmed_address: Callable[[Pod, str], None],
        authority: AddressAuthority,
    ) -> None:
        """admit: what a pod's gates let in; on_gated: awaited with the interfaces of a pod whose
        wanted state stands; on_change: pods came, went or were looked at; why_not_strict: one
        sentence about a pod in strict to which the relay does not carry, None where it does;
        other_gates: interfaces of no pod that are gated; unready_because: why not every pod of the
        node has been told yet; on_first_gate, on_gate_lost, on_unconfirmed_address: as of
        `PodGates`."""
        self.guarded: dict[str, PodState] = {}
        self.is_synced = False
        self._gate_worker = gate_worker
        self._authority = authority
        self._conditions = conditions
        self._probing = probing
        self._metrics = metrics
        self._resync_seconds = resync_seconds
        self._on_gated = on_gated
        self._on_change = on_change
        self._why_not_strict = why_not_strict
        self._other_gates = other_gates
        self._unready_because = unready_because
        self.places = ChainOrder(gate_worker, metrics, self._mark_interfaces)
        self._guard = PodGates(
            gate_worker,
            reader,
            metrics,
            self._other_user_of,
            admit,
            self.places,
            authority,
            on_first_gate,
            on_gate_lost,
            on_unconfirmed_address,
        )
        self.self_test = PathTester(gate_worker.self_tests, metrics, self.publish)
        self._marked: dict[str, None] = {}
        self._forgetful: dict[str, None] = {}
        """Pods whose gates may not remember yet what they ask."""
        self._graces: list[GracePeriod] = []
        self._leaving: list[PodState] = []
        self._wake = asyncio.Event()
        self._may_hold_leftovers = True
        self._earlier: set[int] = set()
        self._next_resync = 0.0
        self._pass_started: float | None = None
        self._gated: set[int] = set()
        """Interfaces that `on_gated` is still to be told of."""
        self._next_telling = 0.0

    def set_pod(self, pod: Pod) -> None:
        """A pod is new or has changed."""
        guarded = self.guarded.get(pod.uid) or self._take_back(pod.uid) or PodState(pod)
        if guarded.pod.netns_path != pod.netns_path:
            # What was said is of a sandbox that is another one now.
            guarded.status = None
            self._probing.remove(pod.uid)
            self._conditions.forget(pod.uid)
        guarded.pod = pod
        self._authority.set_pod(pod)
        self.guarded[pod.uid] = guarded
        self.mark(pod.uid)

    def remove_pod(self, uid: str) -> None:
        """A pod is gone: its gates go, its probes end, nothing more is said about it."""
        guarded = self.guarded.pop(uid, None)
        self._marked.pop(uid, None)
        if guarded is None:
            return
        self._probing.remove(uid)
        self.self_test.forget(uid)
        self._authority.forget(uid)
        self._conditions.forget(uid)
        self._metrics.forget(guarded.pod)
        self._leaving.append(guarded)
        self._wake.set()
        self._on_change()
        log.info("pod removed", pod=guarded.pod.full_name, uid=uid)

    def mark(self, uid: str) -> None:
        """Have another look at one pod."""
        self._marked[uid] = None
        self._wake.set()

    def mark_all(self) -> None:
        """Have another look at every pod."""
        self._mark_where(lambda guarded: True)

    def mark_pending(self) -> None:
        """Have another look at pods that wait for something: an interface came or went."""
        self._mark_where(lambda guarded: guarded.needs_recheck)

    def mark_namespace(self, nsid: int) -> None:
        """Have another look at the pod in the namespace with this number."""
        self._mark_where(
            lambda guarded: guarded.network is None or guarded.network.nsid in (None, nsid)
        )

    def is_settled(self) -> bool:
        """Whether every pod has been looked at since it was last marked."""
        return self.is_synced and not self._marked and self._pass_started is None

    def seconds_in_pass(self) -> float:
        """How long the present pass has taken; 0 between passes."""
        if self._pass_started is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._pass_started

    async def run(self) -> None:
        """Bring marked pods up to date, for ever."""
        # What podgate-cni gates from now on are pods that nobody has told of yet.
        self._earlier = set(await self._gate_worker.installed())
        while True:
            self._pass_started = None
            await self._wait()
            self._pass_started = asyncio.get_running_loop().time()
            self._wake.clear()
            for leaving in list(self._leaving):
                await self._release(leaving)
            looked_at: list[PodState] = []
            while self._marked:
                uid = next(iter(self._marked))
                del self._marked[uid]
                if guarded := self.guarded.get(uid):
                    await self._bring_up(guarded)
                    looked_at.append(guarded)
                    await self._tell_gated(is_last=not self._marked)
            for guarded in looked_at:
                self.self_test.want(guarded)
                self._forgetful[guarded.pod.uid] = None
            await self._remember()
            if looked_at:
                self._on_change()
            if self._unready_because() is not None:
                continue
            if self._may_hold_leftovers:
                await self._release_leftovers()
            self.is_synced = True

    async def _wait(self) -> None:
        """Until something is marked; what waits is marked after 1 s, everything at resync."""
        loop = asyncio.get_running_loop()
        until_resync = max(0.0, self._next_resync - loop.time())
        is_pending = (
            not self.is_synced
            or bool(self._leaving)
            or any(guarded.needs_recheck for guarded in self.guarded.values())
        )
        seconds = min(_RETRY_SECONDS, until_resync) if is_pending else until_resync
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            self.mark_pending()
        if loop.time() >= self._next_resync:
            self._next_resync = loop.time() + self._resync_seconds
            self.mark_all()

    async def _bring_up(self, guarded: PodState) -> None:
        pod = guarded.pod
        try:
            isolation = await self._guard.bring_up(guarded)
        except (AttachError, OSError, TimeoutError) as error:
            # The kernel or its netlink had a bad moment; the next pass tries again.
            log.error("pod could not be looked at", pod=pod.full_name, error=str(error))
            if guarded.gated_netns:
                return
            isolation = IsolationStatus(FALSE, "GateFailed", f"The kernel refused: {error}.")
        if pod.uid not in self.guarded:
            return
        guarded.status = isolation
        self._on_change()
        self.publish(pod.uid)
        self._probing.update(guarded)
        if guarded.gated_netns:
            # A look that finds all as it was costs the others nothing.
            self._gated |= guarded.interface_indexes - guarded.announced
            guarded.announced = guarded.interface_indexes

    async def _tell_gated(self, *, is_last: bool) -> None:
        """Some at a time: telling a node's rule set takes longer than a gate does."""
        now = asyncio.get_running_loop().time()
        if self._gated and (is_last or now >= self._next_telling):
            self._next_telling = now + _TELL_SECONDS
            await self._on_gated(self._gated)
            self._gated = set()

    def publish(self, uid: str) -> None:
        """Say what is known of a pod's isolation, unless its self-test has still to tell."""
        guarded = self.guarded.get(uid)
        if guarded is None or guarded.status is None:
            return
        if said := self.self_test.judge(guarded, self._as_strict(guarded, guarded.status)):
            self._conditions.set(
                guarded.pod, labels.ISOLATION_READY, said.status, said.reason, said.message
            )

    def _as_strict(self, guarded: PodState, isolation: IsolationStatus) -> IsolationStatus:
        """What the relay adds to gates that stand."""
        if isolation.reason != ENFORCED or not wants_strict(guarded):
            return isolation
        why_not = self._why_not_strict(guarded)
        if why_not is None:
            return dataclasses.replace(isolation, reason="Strict")
        message = f"{isolation.message} Strict is wanted: {why_not}"
        return dataclasses.replace(isolation, message=message)

    async def _remember(self) -> None:
        """Have gates remember what their pods ask, for as long as no pod comes, changes or goes.

        Graces end when all remember: none may end while another pod's runs out.
        """
        while self._forgetful:
            uid = next(iter(self._forgetful))
            del self._forgetful[uid]
            if guarded := self.guarded.get(uid):
                await self._remember_one(guarded)
            if self._wake.is_set():
                return
        while self._graces and not self._wake.is_set():
            grace = self._graces.pop(0)
            try:
                await self._guard.end(grace)
            except (OSError, TimeoutError) as error:
                log.error("a gate's grace goes on", pod=grace.pod, error=str(error))

    async def _remember_one(self, guarded: PodState) -> None:
        try:
            self._graces += await self._guard.remember(guarded)
        except (AttachError, OSError, TimeoutError) as error:
            # TCP is judged all the same; the next pass tries again.
            log.error(
                "the node's answers to this pod are dropped, but for TCP",
                pod=guarded.pod.full_name,
                error=str(error),
            )

    async def _release(self, guarded: PodState) -> None:
        try:
            await self._guard.release(guarded)
        except (AttachError, OSError, TimeoutError) as error:
            log.error(
                "gate could not be removed; it will be tried again",
                pod=guarded.pod.full_name,
                error=str(error),
            )
        else:
            self._leaving.remove(guarded)

    def _take_back(self, uid: str) -> PodState | None:
        """A pod that left and came back before its gates were removed (a renamed manifest)."""
        for guarded in self._leaving:
            if guarded.pod.uid == uid:
                self._leaving.remove(guarded)
                return guarded
        return None

    async def _release_leftovers(self) -> None:
        """Remove gates of an earlier run that no pod claims any more, and pins of other versions.

        Not while a pod's manifest cannot be read or its namespace cannot be looked at: the gate may
        be its.
        """
        if any(guarded.is_pending for guarded in self.guarded.values()):
            return
        claimed = {ifindex for guarded in self.guarded.values() for ifindex in guarded.gates}
        claimed.update(self._other_gates())
        try:
            installed = (await self._gate_worker.installed()).keys()
            for ifindex in (installed & self._earlier) - claimed:
                await self._gate_worker.remove(ifindex)
                log.info("gate of a pod that is gone removed", ifindex=ifindex)
            is_clean = await self._gate_worker.collect()
        except (AttachError, OSError, TimeoutError) as error:
            log.error("what an earlier run left could not be removed", error=str(error))
            return
        self._may_hold_leftovers = not is_clean

    def _mark_interfaces(self, ifindexes: set[int]) -> None:
        self._mark_where(lambda guarded: not guarded.gates.keys().isdisjoint(ifindexes))

    def _mark_where(self, predicate: Callable[[PodState], bool]) -> None:
        for uid, guarded in self.guarded.items():
            if predicate(guarded):
                self._marked[uid] = None
        if self._marked:
            self._wake.set()

    def _other_user_of(self, netns: Netns, pod: Pod) -> Pod | None:
        for uid, guarded in self.guarded.items():
            other = guarded.netns
            if (
                uid != pod.uid
                and other is not None
                and (other.device, other.inode) == (netns.device, netns.inode)
            ):
                return guarded.pod
        return None
