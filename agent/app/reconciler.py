"""Brings the gates of every pod into the desired state: one loop over the pods that were marked.

Level-triggered: a pass reads what is attached and attaches what is desired, so a lost or doubled
mark only costs time.
"""

import asyncio
import errno

import structlog

from agent.gates.path_test import PathTester
from agent.gates.pod_gates import PodGates
from agent.gates.worker import GateWorker
from agent.logs import Event
from agent.pods.conditions import FALSE
from agent.pods.pod import Pod
from agent.pods.pod_state import GracePeriod, IsolationStatus, PodState
from agent.pods.store import PodStore
from agent.sources.source import PodSource
from bpf.errors import AttachError

log = structlog.get_logger(__name__)

# Pods that wait (for a namespace, an interface, a lock) are retried this often without a mark.
_RETRY_SECONDS = 1.0

_GONE = frozenset({errno.ENODEV, errno.ENOENT, errno.ENXIO})


class Reconciler:
    """All pods of this node."""

    def __init__(
        self,
        *,
        store: PodStore,
        source: PodSource,
        gate_worker: GateWorker,
        pod_gates: PodGates,
        path_tester: PathTester,
        resync_seconds: float,
    ) -> None:
        """resync_seconds: how often every pod is reconciled without a mark."""
        self._store = store
        self._source = source
        self._gate_worker = gate_worker
        self._gates = gate_worker.gates
        self._pod_gates = pod_gates
        self._path_tester = path_tester
        self._resync_seconds = resync_seconds
        self._without_replies: dict[str, None] = {}
        """Pods whose gates may have no reply table yet."""
        self._grace_periods: list[GracePeriod] = []
        self._may_have_leftovers = True
        self._previous_gates: set[int] = set()
        self._next_resync = 0.0
        self._pass_started: float | None = None

    def seconds_in_pass(self) -> float:
        """The duration of the current pass so far; 0 between passes."""
        if self._pass_started is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._pass_started

    async def run(self) -> None:
        """Reconcile marked pods until cancelled."""
        # What podgate-cni gates from now on are pods that no source has reported yet.
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
        """Until a pod is marked. Pending ones are marked after 1 s, all of them at each resync."""
        loop = asyncio.get_running_loop()
        until_resync = max(0.0, self._next_resync - loop.time())
        is_pending = (
            not self._store.is_synced
            or bool(self._store.removed)
            or any(state.needs_recheck for state in self._store.states())
        )
        seconds = min(_RETRY_SECONDS, until_resync) if is_pending else until_resync
        try:
            async with asyncio.timeout(seconds):
                await self._store.to_reconcile.wait()
        except TimeoutError:
            self._store.mark_pending()
        if loop.time() >= self._next_resync:
            self._next_resync = loop.time() + self._resync_seconds
            self._store.mark_all()

    async def _reconcile(self) -> None:
        """One pass. Closing comes first: all that may take long waits until every pod is gated."""
        retried = dict(self._store.removed)
        for state in retried.values():
            await self._detach(state)
        reconciled: list[PodState] = []
        while uid := self._store.to_reconcile.take_one():
            if marked := self._store.get(uid):
                await self._reconcile_pod(marked)
                reconciled.append(marked)
            elif uid in self._store.removed and uid not in retried:
                await self._detach(self._store.removed[uid])
        for state in reconciled:
            self._path_tester.enqueue(state)
            self._without_replies[state.pod.uid] = None
        await self._fill_reply_tables()
        for state in reconciled:
            self._store.in_force.mark(state.pod.uid)
        if self._source.unready_reason is not None:
            return
        if self._may_have_leftovers:
            await self._remove_leftovers()
        self._store.synced.set()

    async def _reconcile_pod(self, state: PodState) -> None:
        pod = state.pod
        try:
            status = await self._pod_gates.reconcile(state)
        except (AttachError, OSError, TimeoutError) as error:
            # Usually a temporary error of the kernel or netlink; the next pass tries again.
            _log_failure(Event.POD_RECONCILE_FAILED, pod, error)
            if state.gated_netns:
                return
            status = IsolationStatus(FALSE, "GateFailed", f"Kernel error: {error}.")
        if self._store.get(pod.uid) is not state or state.pod.netns_path != pod.netns_path:
            return  # Removed meanwhile, or marked again for another sandbox.
        state.status = status
        self._store.in_force.mark(pod.uid)

    async def _fill_reply_tables(self) -> None:
        """Have gates record their pods' flows, until a pod is marked.

        Grace periods end when all are filled: none may end while another pod's runs out.
        """
        while self._without_replies:
            uid = next(iter(self._without_replies))
            del self._without_replies[uid]
            if state := self._store.get(uid):
                await self._fill_reply_tables_of(state)
            if not self._store.to_reconcile.is_empty:
                return
        while self._grace_periods and self._store.to_reconcile.is_empty:
            grace = self._grace_periods.pop(0)
            try:
                await self._pod_gates.end_grace_period(grace)
            except (OSError, TimeoutError) as error:
                log.error(Event.GRACE_PERIOD_NOT_ENDED, pod=grace.pod, error=str(error))

    async def _fill_reply_tables_of(self, state: PodState) -> None:
        try:
            self._grace_periods += await self._pod_gates.fill_reply_tables(state)
        except (AttachError, OSError, TimeoutError) as error:
            # TCP replies pass anyway; the next pass tries again.
            _log_failure(Event.REPLY_TABLE_FAILED, state.pod, error)

    async def _detach(self, state: PodState) -> None:
        try:
            await self._pod_gates.detach(state)
        except (AttachError, OSError, TimeoutError) as error:
            _log_failure(Event.GATE_DETACH_FAILED, state.pod, error)
        else:
            self._store.removed.pop(state.pod.uid, None)

    async def _remove_leftovers(self) -> None:
        """Remove gates of a previous agent that no pod claims, and pins of other versions.

        Not while a pod's manifest or network namespace cannot be read: the gate may be its own.
        """
        if any(state.is_pending for state in self._store.states()):
            return
        claimed = self._store.gated_interfaces()
        try:
            installed = (await self._gate_worker.run(self._gates.installed)).keys()
            for ifindex in (installed & self._previous_gates) - claimed:
                await self._gate_worker.remove(ifindex)
                log.info(Event.STALE_GATE_REMOVED, ifindex=ifindex)
            is_clean = await self._gate_worker.remove_stale()
        except (AttachError, OSError, TimeoutError) as error:
            log.error(Event.LEFTOVERS_NOT_REMOVED, error=str(error))
            return
        self._may_have_leftovers = not is_clean


def _log_failure(event: Event, pod: Pod, error: Exception) -> None:
    """An error, unless the pod's interface or namespace disappeared during the pass."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.errno in _GONE:
        log.info(Event.POD_VANISHED, pod=pod.full_name, error=str(error))
    else:
        log.error(event, pod=pod.full_name, error=str(error))
