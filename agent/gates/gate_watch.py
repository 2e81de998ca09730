"""Puts gates back that another program removed, and notices those that no longer come first; puts
back the programs of host devices, too.

Whether a gate is in force is read from the kernel, never from what was attached once. The kernel
reports changes of qdiscs and filters (`agent.linux.traffic_control`), so a filter is back some
milliseconds after it was deleted. It sends no message about tcx programs: their chains are read
after each change that `agent.gates.chain_changes` notices. Where the kernel does not offer that,
they are read again and again: 2 us for each program, under RTNL.
"""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Set

import structlog

from agent import tasks
from agent.gates.chain_changes import POLL_SECONDS, ChainChanges
from agent.gates.lost_filters import LostFilters
from agent.gates.metrics import GateMetrics
from agent.gates.worker import GateWorker
from agent.logs import Event
from agent.pods.store import PodStore
from bpf import memory_watch
from bpf.attachment import Attachment
from bpf.errors import AttachError, BpfError, CompileError
from bpf.gates import GateCheck
from bpf.memory_watch import MemoryWatch
from bpf.tcx_chains import TcxChains

log = structlog.get_logger(__name__)

QUIET_SECONDS = 30.0
"""Between checks without any change; nothing should be found then."""

# A check reads chains under RTNL: where there are many, checks take at most a fiftieth of the time.
# One that had to wait for RTNL shows little about the next one.
_PAUSE_PER_SECOND, _LONGEST_PAUSE_SECONDS = 50.0, 0.5
# What cannot be repaired is tried again, and its pods are marked, at this pace.
REPEAT_SECONDS = 5.0
# To load the program of `MemoryWatch` takes 25 ms of CPU, which a start has better uses for.
_START_SECONDS = 5.0
# podgate-cni removes a gate, then the network plugin the interface, within milliseconds: that is no
# loss.
_DELETION_SECONDS = 1.0
# Two programs that remove each other's work do so without end: not each time is logged.
_LOG_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """The result of one check. failed: why a lost gate cannot be put back; moved: gates that were
    moved first since the check before; devices: host devices whose programs were lost, with the
    reason if they cannot be put back; seconds: without the wait for the worker's thread."""

    put_back: frozenset[int]
    failed: Mapping[int, str]
    displaced: frozenset[int]
    moved: frozenset[int]
    devices: Mapping[int, str]
    seconds: float


class GateWatch:
    """Compares attached gates with the kernel."""

    def __init__(
        self,
        gate_worker: GateWorker,
        store: PodStore,
        metrics: GateMetrics,
        *,
        on_put_back: Callable[[Collection[int]], None],
        on_lost: Callable[[frozenset[int]], None],
        is_off: Callable[[], bool],
        open_chains: Callable[[], TcxChains] = TcxChains,
        open_memory: Callable[[float], Awaitable[MemoryWatch]] = memory_watch.load,
    ) -> None:
        """store: pods whose gates changed are marked there. is_off: whether the node was just
        switched off, so that gates are missing on purpose; it may block. on_put_back gets the
        interfaces whose gates were put back just now; on_lost all those whose gates cannot be put
        back, whenever that changes."""
        self._gate_worker = gate_worker
        self._gates = gate_worker.gates
        self._store = store
        self._metrics = metrics
        self._on_put_back = on_put_back
        self._on_lost = on_lost
        self._is_off = is_off
        self._open_chains = open_chains
        self._open_memory = open_memory
        self._chains: ChainChanges | None = None
        self._woken = asyncio.Event()
        self._gated = store.in_force.subscribe()
        """For the first gate."""
        self._changed: set[int] | None = None
        """Interfaces whose filters may have changed; None: any."""
        self._put_back: frozenset[int] = frozenset()
        """Interfaces whose gates `LostFilters` has put back; not reported yet."""
        self._displaced: frozenset[int] = frozenset()
        self._repeat_at = 0.0
        self._logged: dict[int, float] = {}
        self._lost_devices: frozenset[int] = frozenset()
        self.lost: frozenset[int] = frozenset()
        """Interfaces whose gate was removed and cannot be put back."""

    def hint(self, changed: set[int] | None) -> None:
        """Qdiscs or filters of these interfaces changed; None: of any."""
        self._changed = (
            None if changed is None or self._changed is None else self._changed | changed
        )
        self._woken.set()

    async def run(self) -> None:
        """Put back and check gates until cancelled. Raises `OSError`."""
        repairs = await self._gate_worker.repair(
            functools.partial(
                LostFilters,
                is_off=self._is_off,
                on_put_back=self._handle_put_back,
                on_failed=self.hint,
            )
        )
        with contextlib.ExitStack() as opened:
            opened.callback(repairs.stop)
            if self._gates.attachment is Attachment.TCX:
                with contextlib.suppress(BpfError):
                    chains = await asyncio.to_thread(self._open_chains)
                    self._chains = ChainChanges(chains, self._woken.set)
                    self._gate_worker.on_run = self._chains.note_own
                    opened.callback(self._close_chains)
            await self._check_again_and_again()

    def _close_chains(self) -> None:
        self._gate_worker.on_run = lambda: None
        if self._chains:
            self._chains.close()
            self._chains = None

    async def _compare_chains(self, chains: ChainChanges) -> None:
        """Once the work of the start is done."""
        await asyncio.sleep(_START_SECONDS)
        with contextlib.suppress(OSError, CompileError):
            chains.compare_by(await self._open_memory(POLL_SECONDS))

    async def _check_again_and_again(self) -> None:
        """GateCheck after each change of filters; for links after each change that is noticed, or
        every 80 ms."""
        is_opened = False
        async with asyncio.TaskGroup() as group:
            while True:
                self._woken.clear()
                pause_seconds = REPEAT_SECONDS
                self._gated.take()
                if not self._store.gated_interfaces():
                    await self._gated.wait()
                    continue
                changed, self._changed = self._changed, set()
                # Before the check: what changes during it is seen afterwards.
                state = self._chains.state() if self._chains else None
                try:
                    found = await self._gate_worker.run_check(
                        functools.partial(_check, self._gate_worker),
                        changed,
                        {*self.lost, *self._displaced, *self._lost_devices},
                        self._is_off,
                    )
                except OSError as error:
                    log.error(Event.CHAIN_ORDER_UNKNOWN, error=str(error))
                    # Nor is it known which gates had been moved first before.
                    self._displaced = frozenset()
                    self.hint(None)
                else:
                    if self._gates.attachment is Attachment.TCX:
                        pause_seconds = min(
                            max(POLL_SECONDS, found.seconds * _PAUSE_PER_SECOND),
                            _LONGEST_PAUSE_SECONDS,
                        )
                    self._handle(found)
                    if put_back := found.put_back | self._put_back:
                        self._put_back = frozenset()
                        group.create_task(self._report(put_back))
                if self._chains is None or state is None or self.lost or self._lost_devices:
                    await self._wait(pause_seconds)
                    continue
                if not is_opened:
                    is_opened = True
                    group.create_task(self._compare_chains(self._chains))
                await self._wait_for_change(self._chains, state, pause_seconds)

    async def _wait_for_change(
        self, chains: ChainChanges, state: bytes, pause_seconds: float
    ) -> None:
        """Until filters changed, or chains since this state, or it is time to check without
        that."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (REPEAT_SECONDS if self._displaced else QUIET_SECONDS)
        try:
            while not self._woken.is_set() and loop.time() < until:
                chains.watch(state, pause_seconds)
                await self._wait(tasks.next_tick(REPEAT_SECONDS) - loop.time())
        finally:
            chains.stop()

    async def _wait(self, seconds: float) -> None:
        """Until filters changed, or a time that others need the kernel's lock."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return

    def _handle_put_back(self, ifindex: int) -> None:
        self._put_back |= {ifindex}
        self._on_put_back({ifindex})
        self._store.mark_interfaces({ifindex})

    def _handle(self, found: _Found) -> None:
        now = asyncio.get_running_loop().time()
        is_repeat = now >= self._repeat_at
        if is_repeat:
            self._repeat_at = now + REPEAT_SECONDS
        lost = frozenset(found.failed)
        # Another program that precedes a gate right after its move is another finding.
        displaced = found.displaced - (self._displaced - found.moved)
        marked = set(found.put_back | (self.lost ^ lost) | displaced)
        if is_repeat:
            marked |= found.displaced | lost
        if lost != self.lost:
            self._on_lost(lost)
        self.lost, self._displaced = lost, found.displaced
        self._lost_devices = frozenset(i for i, problem in found.devices.items() if problem)
        for ifindex, problem in found.devices.items():
            if _exists(ifindex) and now >= self._logged.get(ifindex, now):
                self._logged[ifindex] = now + _LOG_SECONDS
                log.warning(Event.HOST_DEVICE_PUT_BACK, ifindex=ifindex, problem=problem)
        if found.put_back:
            self._on_put_back(found.put_back)
        if marked:
            self._store.mark_interfaces(marked)

    async def _report(self, ifindexes: Collection[int]) -> None:
        """Count and log gates that were put back, unless their interfaces were being deleted."""
        await asyncio.sleep(_DELETION_SECONDS)
        now = asyncio.get_running_loop().time()
        for ifindex in ifindexes:
            pod = self._store.pod_of_interface(ifindex)
            if pod is None or not _exists(ifindex):
                self._logged.pop(ifindex, None)
                continue
            self._metrics.gates_put_back.inc()
            if now >= self._logged.get(ifindex, now):
                self._logged[ifindex] = now + _LOG_SECONDS
                log.warning(Event.GATE_PUT_BACK, pod=pod.full_name, ifindex=ifindex)


def _check(
    gate_worker: GateWorker,
    changed: Set[int] | None,
    before: Collection[int],
    is_off: Callable[[], bool],
) -> _Found:
    """In one call, since the event loop may be busy between two. before: those that were lost or
    displaced."""
    started = time.monotonic()
    gates, host_devices = gate_worker.gates, gate_worker.host_devices
    moved = frozenset(gate_worker.take_moved())
    suspects = None if changed is None else {*before, *changed}
    found: GateCheck = gates.check(suspects)
    of_devices = host_devices.lost(suspects)
    put_back, failed = set(), {}
    lost = found.lost
    if (lost or of_devices) and is_off():
        lost, of_devices = frozenset(), {}
    for ifindex, result in gates.put_back(lost).items():
        if result is True:
            put_back.add(ifindex)
        elif isinstance(result, AttachError) and _exists(ifindex):
            failed[ifindex] = str(result)
    devices = host_devices.put_back(of_devices)
    seconds = time.monotonic() - started
    return _Found(frozenset(put_back), failed, found.displaced, moved, devices, seconds)


def _exists(ifindex: int) -> bool:
    """True while that is unknown: this process has no descriptor left."""
    try:
        socket.if_indextoname(ifindex)
    except OSError as error:
        return error.errno not in (errno.ENXIO, errno.ENODEV)
    return True
