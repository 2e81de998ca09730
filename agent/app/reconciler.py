"""Brings the gates of every pod into the desired state: one loop over the pods that were marked.

Level-triggered: a pass reads what is attached and attaches what is desired, so a lost or doubled
mark only costs time. A pass handles each pod once, and pods that keep changing are marked at their
own pace (`agent.pods.pacing`): no pod delays another.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Collection

import structlog

from agent.gates.failures import has_vanished
from agent.gates.grace_periods import GracePeriods
from agent.gates.path_test import PathTester
from agent.gates.pod_gates import PodGates
from agent.gates.worker import GateWorker
from agent.logs import Event
from agent.pods.conditions import FALSE
from agent.pods.pod import Pod
from agent.pods.pod_state import IsolationStatus, PodState
from agent.pods.store import PodStore
from agent.sources.source import PodSource
from bpf.errors import AttachError
from probes.netns import NetnsUnreadableError

log = structlog.get_logger(__name__)

# Pods that wait (for a namespace, an interface, a lock) are retried this often without a mark.
_RETRY_SECONDS = 1.0
# Another version's pins stay while host devices still run its programs, which are replaced beside
# the pods' gates.
_LEFTOVERS_SECONDS = 5.0
_TICK_SECONDS = 0.001
# Pods without a gate whose networks are read side by side.
_AT_ONCE = 8


class Reconciler:
    """All pods of this node."""

    def __init__(
        self,
        *,
        store: PodStore,
        source: PodSource,
        gate_worker: GateWorker,
        pod_gates: PodGates,
        grace_periods: GracePeriods,
        path_tester: PathTester,
        resync_seconds: float,
    ) -> None:
        """resync_seconds: how often every pod is reconciled without a mark."""
        self._store = store
        self._source = source
        self._gate_worker = gate_worker
        self._gates = gate_worker.gates
        self._pod_gates = pod_gates
        self._grace_periods = grace_periods
        self._path_tester = path_tester
        self._resync_seconds = resync_seconds
        self._may_have_leftovers = True
        self._previous_gates: set[int] | None = None
        """Those that the first run found."""
        self._next_leftovers = 0.0
        self._next_resync = 0.0
        self._next_retry = 0.0
        self._pass_started: float | None = None

    def seconds_in_pass(self) -> float:
        """The duration of the current pass so far; 0 between passes."""
        if self._pass_started is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._pass_started

    async def run(self) -> None:
        """Reconcile marked pods until cancelled."""
        # What podgate-cni gates from now on are pods that no source has reported yet.
        if self._previous_gates is None:
            self._previous_gates = set(await self._gate_worker.run(self._gates.installed))
        while True:
            await self._wait()
            self._pass_started = asyncio.get_running_loop().time()
            self._store.is_reconciling = True
            try:
                await self._reconcile()
            finally:
                self._store.is_reconciling = False
                self._pass_started = None

    async def _wait(self) -> None:
        """Until a pod is marked, or leftovers are to be removed. Pending pods are marked every
        second, all at each resync."""
        loop = asyncio.get_running_loop()
        marks = self._store.to_reconcile
        while True:
            now = loop.time()
            is_retry = self._has_pending() and now >= self._next_retry
            if is_retry:
                self._next_retry = now + _RETRY_SECONDS
                self._store.mark_pending()
            if now >= self._next_resync:
                self._next_resync = now + self._resync_seconds
                self._store.mark_all()
            next_change = self._store.network_changes.mark_due()
            is_cleanup = self._may_have_leftovers and now >= self._next_leftovers
            has_changes = not (marks.is_empty and self._store.changed_rules.is_empty)
            if is_retry or is_cleanup or has_changes:
                return
            marks.changed.clear()
            deadlines = [self._next_resync]
            if self._may_have_leftovers:
                deadlines.append(self._next_leftovers)
            if next_change is not None:
                deadlines.append(next_change)
            if self._has_pending():
                deadlines.append(self._next_retry)
            with contextlib.suppress(TimeoutError):
                # A timeout may end a clock tick early.
                async with asyncio.timeout_at(min(deadlines) + _TICK_SECONDS):
                    await marks.changed.wait()

    def _has_pending(self) -> bool:
        """Whether a pass may find something without a mark."""
        return (
            not self._store.is_synced
            or bool(self._store.removed)
            or any(state.needs_recheck for state in self._store.states())
        )

    async def _reconcile(self) -> None:
        """One pass: every marked pod once, whatever is marked meanwhile."""
        self._next_leftovers = asyncio.get_running_loop().time() + _LEFTOVERS_SECONDS
        removed = dict(self._store.removed)
        for gone in removed.values():
            await self._detach(gone)
        await self._update_rules()
        done: set[str] = set()
        while uids := self._next_marked(done):
            done.update(uids)
            states = [state for uid in uids if (state := self._store.get(uid))]
            if any(state.is_pending for state in states) and self._store.awaited.isdisjoint(uids):
                await self._grace_periods.wait_for_room()
            for uid in uids:
                self._store.to_reconcile.take_one(uid)
            async with self._pod_gates.reading(states):
                for uid in uids:
                    await self._reconcile_marked(uid, removed)
        if self._source.unready_reason is not None:
            return
        if self._may_have_leftovers:
            await self._remove_leftovers()
        self._store.synced.set()

    async def _reconcile_marked(self, uid: str, detached: Collection[str]) -> None:
        """detached: what this pass has handled already."""
        if state := self._store.get(uid):
            await self._reconcile_pod(state)
            self._path_tester.enqueue(state)
            self._grace_periods.enqueue(state)
        elif uid in self._store.removed and uid not in detached:
            await self._detach(self._store.removed[uid])

    async def _update_rules(self) -> None:
        """Write the rules of all pods whose rules changed; those that need more are marked."""
        uids = self._store.changed_rules.take()
        states = [state for uid in uids if (state := self._store.get(uid))]
        if not states:
            return
        try:
            updated = await self._pod_gates.update_rules(states)
        except TimeoutError as error:
            log.error(Event.RULES_NOT_UPDATED, pods=len(states), error=str(error))
            updated = set()
        for state in states:
            if state.pod.uid in updated:
                self._store.in_force.mark(state.pod.uid)
            else:
                self._store.mark(state.pod.uid)

    def _next_marked(self, done: Collection[str]) -> list[str]:
        """Marked pods that are not done yet: those for which the runtime waits, then some without a
        gate, else the first one."""
        waiting = [uid for uid in self._store.to_reconcile.waiting if uid not in done]
        if awaited := [uid for uid in waiting if uid in self._store.awaited]:
            return awaited
        first = (uid for uid in waiting if (state := self._store.get(uid)) and state.is_pending)
        return list(itertools.islice(first, _AT_ONCE)) or waiting[:1]

    async def _reconcile_pod(self, state: PodState) -> None:
        pod = state.pod
        try:
            status = await self._pod_gates.reconcile(state)
        except (AttachError, NetnsUnreadableError, OSError) as error:
            # Usually a temporary error of the kernel or netlink; the next pass tries again.
            _log_failure(Event.POD_RECONCILE_FAILED, pod, error)
            if state.gated_netns:
                state.has_failed = True
                return
            status = IsolationStatus(FALSE, "GateFailed", f"Kernel error: {error}.")
        if self._store.get(pod.uid) is not state or state.pod.netns_path != pod.netns_path:
            return  # Removed meanwhile, or marked again for another sandbox.
        state.status = status
        self._store.in_force.mark(pod.uid)

    async def _detach(self, state: PodState) -> None:
        try:
            await self._pod_gates.detach(state)
        except (AttachError, OSError) as error:
            _log_failure(Event.GATE_DETACH_FAILED, state.pod, error)
        else:
            self._store.removed.pop(state.pod.uid, None)

    async def _remove_leftovers(self) -> None:
        """Remove gates of a previous agent that no pod claims, and pins of other versions.

        Not while a pod's manifest or network namespace cannot be read: the gate may be its own.
        """
        if any(state.is_pending for state in self._store.states()):
            return
        unclaimed = (self._previous_gates or set()) - self._store.gated_interfaces()
        try:
            # That takes a second for a crowd of pods, in which no gate can be attached.
            if unclaimed:
                unclaimed &= (await self._gate_worker.run(self._gates.installed)).keys()
            for ifindex in unclaimed:
                await self._gate_worker.remove(ifindex)
                log.info(Event.STALE_GATE_REMOVED, ifindex=ifindex)
            is_clean = await self._gate_worker.remove_stale()
        except (AttachError, OSError) as error:
            log.error(Event.LEFTOVERS_NOT_REMOVED, error=str(error))
            return
        self._may_have_leftovers = not is_clean


def _log_failure(event: Event, pod: Pod, error: Exception) -> None:
    """An error, unless the pod's interface or namespace disappeared during the pass."""
    if has_vanished(error):
        log.info(Event.POD_VANISHED, pod=pod.full_name, error=str(error))
    else:
        log.error(event, pod=pod.full_name, error=str(error))
