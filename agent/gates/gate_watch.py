"""Puts gates back that another program removed, and notices those that no longer come first; puts
back the programs of host devices, too.

Whether a gate is in force is read from the kernel, never from what was attached once. The kernel
reports changes of qdiscs and filters (`agent.linux.traffic_control`), so a filter is back some
milliseconds after it was deleted. It sends no message about tcx programs: links are polled, 2 us
for each program.
"""

import asyncio
import dataclasses
import errno
import functools
import socket
import time
from collections.abc import Callable, Collection, Mapping, Set

import structlog

from agent.gates.lost_filters import LostFilters
from agent.gates.metrics import GateMetrics
from agent.gates.worker import GateWorker
from agent.logs import Event
from agent.pods.store import PodStore
from bpf.attachment import Attachment
from bpf.errors import AttachError
from bpf.gates import GateCheck, Gates
from bpf.host_devices import HostDevicePrograms

log = structlog.get_logger(__name__)

# A link is back within 100 ms.
_POLL_SECONDS = 0.08
# A check reads chains under RTNL: where there are many, checks take at most a fiftieth of the time.
# One that had to wait for RTNL shows little about the next one.
_PAUSE_PER_SECOND, _LONGEST_PAUSE_SECONDS = 50.0, 0.5
# A timer may end a clock tick early.
_TICK_SECONDS = 0.001
# What cannot be repaired is tried again, and its pods are marked, at this pace.
_REPEAT_SECONDS = 5.0
# podgate-cni removes a gate, then the network plugin the interface, within milliseconds: that is no
# loss.
_DELETION_SECONDS = 1.0
# Two programs that remove each other's work do so without end: not each time is logged.
_LOG_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """The result of one check. failed: why a lost gate cannot be put back; devices: host devices
    whose programs were lost, with the reason if they cannot be put back; seconds: without the wait
    for the worker's thread."""

    put_back: frozenset[int]
    failed: Mapping[int, str]
    displaced: frozenset[int]
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
    ) -> None:
        """store: pods whose gates changed are marked there. is_off: whether the node was just
        switched off, so that gates are missing on purpose; it may block. on_put_back gets the
        interfaces whose gates were put back just now; on_lost all those whose gates cannot be put
        back, whenever that changes."""
        self._repair = gate_worker.repair
        self._run_first = gate_worker.run_first
        self._gates = gate_worker.gates
        self._host_devices = gate_worker.host_devices
        self._store = store
        self._metrics = metrics
        self._on_put_back = on_put_back
        self._on_lost = on_lost
        self._is_off = is_off
        self._woken = asyncio.Event()
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
        repairs = await self._repair(
            functools.partial(
                LostFilters,
                is_off=self._is_off,
                on_put_back=self._handle_put_back,
                on_failed=self.hint,
            )
        )
        try:
            await self._check_again_and_again()
        finally:
            repairs.stop()

    async def _check_again_and_again(self) -> None:
        """GateCheck after each change of filters, and for links every 80 ms."""
        now = asyncio.get_running_loop().time
        next_poll = now()
        async with asyncio.TaskGroup() as reports:
            while True:
                self._woken.clear()
                if not self._store.gated_interfaces():
                    await self._wait(_POLL_SECONDS)
                    continue
                changed, self._changed = self._changed, set()
                before = {*self.lost, *self._lost_devices}
                suspects = None if changed is None else before | changed
                # What the kernel reports of one interface, such as a new one's filters, is no
                # reason to read the links of all.
                is_poll = suspects is None or now() + _TICK_SECONDS >= next_poll
                try:
                    found = await self._run_first(
                        functools.partial(_check, self._gates, self._host_devices),
                        suspects,
                        self._is_off,
                        is_poll=is_poll,
                    )
                except OSError as error:
                    log.error(Event.CHAIN_ORDER_UNKNOWN, error=str(error))
                    self.hint(None)
                    next_poll = now() + _REPEAT_SECONDS
                else:
                    if is_poll:
                        next_poll = now() + self._pause(found.seconds)
                    elif suspects is not None:
                        others = self._displaced - suspects
                        found = dataclasses.replace(found, displaced=found.displaced | others)
                    self._handle(found)
                    if put_back := found.put_back | self._put_back:
                        self._put_back = frozenset()
                        reports.create_task(self._report(put_back))
                await self._wait(next_poll - now())

    def _pause(self, seconds: float) -> float:
        """Until the next poll. seconds: that this one took."""
        if self._gates.attachment is not Attachment.TCX:
            return _REPEAT_SECONDS
        return min(max(_POLL_SECONDS, seconds * _PAUSE_PER_SECOND), _LONGEST_PAUSE_SECONDS)

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
            self._repeat_at = now + _REPEAT_SECONDS
        lost = frozenset(found.failed)
        marked = set(found.put_back | (self.lost ^ lost) | (found.displaced - self._displaced))
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
    gates: Gates,
    host_devices: HostDevicePrograms,
    suspects: Set[int] | None,
    is_off: Callable[[], bool],
    *,
    is_poll: bool,
) -> _Found:
    """In one call, since the event loop may be busy between two. suspects: interfaces that were
    lost or have changed, None for all; is_poll: whether all links are read, too."""
    started = time.monotonic()
    found: GateCheck = gates.check(suspects, has_links=is_poll)
    of_devices = host_devices.lost(suspects, has_links=is_poll)
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
    return _Found(frozenset(put_back), failed, found.displaced, devices, seconds)


def _exists(ifindex: int) -> bool:
    """True while that is unknown: this process has no descriptor left."""
    try:
        socket.if_indextoname(ifindex)
    except OSError as error:
        return error.errno not in (errno.ENXIO, errno.ENODEV)
    return True
