"""Grace periods of new gates: each ends once the gate's reply table has the pod's pending flows.

This runs beside the reconciler, which gates further pods meanwhile: closing comes first, and a
reply table takes longer than a gate. Calls of both alternate in the worker's thread. Pods that wait
at the same time share what waits for RCU, and their sockets are listed side by side. No gate's
grace period may run out before its reply table is filled, so the reconciler waits before it gates
another pod while too many wait for theirs.
"""

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Collection, Mapping

import structlog

from agent.gates import pending_flows
from agent.gates.crowds import Crowds
from agent.gates.failures import has_vanished
from agent.gates.worker import GateWorker
from agent.linux.pod_network import HostInterface
from agent.logs import Event
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from bpf.errors import AttachError
from bpf.gates import Gates
from probes.netns import NetnsGoneError

log = structlog.get_logger(__name__)

GRACE_SECONDS = 30.0
"""The longest grace period, which a new gate gets."""

# Requests from before the reply table are answered within this time or sent again: resolv.conf's
# default timeout is 5 s.
_INCOMPLETE_NS = 5_000_000_000

# Half of the grace period is reserve: the estimate is how long the last reply table took.
_MAX_WAIT_SECONDS = GRACE_SECONDS / 2
_FIRST_ESTIMATE_SECONDS = 0.1
# Of a batch: the last one of 32 waits for the others' 32 * 5 ms of CPU time.
_AT_ONCE = 32
# Thousands of sockets are read in milliseconds, by threads that others need as well.
_READ_SECONDS = 5.0
_READERS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class _Filled:
    """A gate whose reply table is filled. incomplete: why there may be more flows, or nothing."""

    interface: HostInterface
    flow_count: int
    incomplete: str


class GracePeriods:
    """Starts and fills the reply tables of gated pods in batches, oldest first."""

    def __init__(self, gate_worker: GateWorker, store: PodStore, crowds: Crowds) -> None:
        """store: pods whose reply tables are filled are marked there."""
        self._crowds = crowds
        self._readers = asyncio.Semaphore(_READERS)
        self._run = gate_worker.run
        self._gates = gate_worker.gates
        self._store = store
        self._waiting: dict[str, None] = {}
        self._unfilled: set[int] = set()
        """Interfaces whose reply tables were started and not filled since."""
        self._seconds_per_pod = _FIRST_ESTIMATE_SECONDS
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()

    def enqueue(self, state: PodState) -> None:
        """A pod was reconciled: its gates may have no reply table yet."""
        if state.gates:
            self._waiting[state.pod.uid] = None
            self._wake.set()

    async def wait_for_room(self) -> None:
        """Wait until another new gate would get its reply table well within its grace period."""
        while len(self._waiting) * self._seconds_per_pod > _MAX_WAIT_SECONDS:
            self._progress.clear()
            await self._progress.wait()

    async def run(self) -> None:
        """Fill reply tables until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            batch = list(itertools.islice(self._waiting, _AT_ONCE))
            for uid in batch:
                del self._waiting[uid]
            started = loop.time()
            try:
                filled = await self._fill_all([s for uid in batch if (s := self._store.get(uid))])
            except BaseException:
                self._waiting |= dict.fromkeys(batch)
                raise
            if filled:
                self._seconds_per_pod = (loop.time() - started) / len(batch)
            for uid in filled:
                self._store.in_force.mark(uid)
            self._progress.set()

    async def _fill_all(self, states: Collection[PodState]) -> list[str]:
        """The uids of pods with new reply tables. A pod that fails or ends concerns no other."""
        ifindexes = [ifindex for state in states for ifindex in state.gates]
        try:
            starts = await self._run(
                _start, self._gates, ifindexes, quickly=self._crowds.is_under_way
            )
        except OSError as error:
            log.error(Event.REPLY_TABLE_FAILED, pod="all pods", error=str(error))
            return []
        filled = await asyncio.gather(*(self._fill(state, starts) for state in states))
        return [state.pod.uid for state, is_new in zip(states, filled, strict=True) if is_new]

    async def _fill(self, state: PodState, starts: Mapping[int, bool | AttachError]) -> bool:
        """Whether any of the pod's reply tables is new. starts: as `Gates.start_reply_tables`."""
        pod = state.pod
        try:
            filled = await self._fill_new(state, starts)
        except (AttachError, OSError) as error:
            # TCP replies pass anyway; the next pass over the pod tries again.
            if has_vanished(error):
                log.info(Event.POD_VANISHED, pod=pod.full_name, error=str(error))
            else:
                log.error(Event.REPLY_TABLE_FAILED, pod=pod.full_name, error=str(error))
            return False
        for gate in filled:
            ends_at_ns = time.monotonic_ns() + _INCOMPLETE_NS if gate.incomplete else 0
            try:
                await self._run(self._gates.end_grace, gate.interface.ifindex, ends_at_ns)
            except OSError as error:
                log.error(Event.GRACE_PERIOD_NOT_ENDED, pod=pod.full_name, error=str(error))
                continue
            log.info(
                Event.GRACE_PERIOD_STARTED if gate.incomplete else Event.REPLY_TABLE_READY,
                pod=pod.full_name,
                interface=gate.interface.name,
                flows=gate.flow_count,
                reason=gate.incomplete,
            )
        return bool(filled)

    async def _fill_new(
        self, state: PodState, starts: Mapping[int, bool | AttachError]
    ) -> list[_Filled]:
        """Fill the pod's new reply tables with its pending flows.

        Where these are not fully known, the grace period lasts a while longer: passing an
        unsolicited packet is better than dropping a valid reply. Raises `AttachError`, `OSError`
        and `TimeoutError`.
        """
        netns, network = state.netns, state.network
        new = []
        for ifindex, interface in state.gates.items():
            result = starts.get(ifindex, False)
            if isinstance(result, AttachError):
                raise result
            if result:
                self._unfilled.add(ifindex)
            if ifindex in self._unfilled:
                new.append(interface)
        if not new or netns is None or network is None:
            return []
        try:
            async with self._readers, asyncio.timeout(_READ_SECONDS):
                pending = await asyncio.to_thread(pending_flows.read, netns, network)
        except TimeoutError:
            pending = pending_flows.PendingFlows((), f"sockets not read in {_READ_SECONDS:g} s")
        except (NetnsGoneError, OSError) as error:
            pending = pending_flows.PendingFlows((), str(error))
        filled = []
        for interface in new:
            fill = self._gates.fill_reply_table
            has_room = await self._run(fill, interface.ifindex, pending.flows)
            self._unfilled.discard(interface.ifindex)
            incomplete = pending.unknown or ("" if has_room else "the reply table is full")
            filled.append(_Filled(interface, len(pending.flows), incomplete))
        return filled


def _start(
    gates: Gates, ifindexes: Collection[int], *, quickly: bool
) -> dict[int, bool | AttachError]:
    """In the worker's thread, where no gate is removed meanwhile: it would leave the table."""
    attached = [ifindex for ifindex in ifindexes if gates.is_attached(ifindex)]
    return gates.start_reply_tables(attached, quickly=quickly)
