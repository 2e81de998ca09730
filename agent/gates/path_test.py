"""The path test: whether packets from the host to a pod go through the pod's gate.

A CNI may bypass the veth (bpf_redirect_peer) or route the host through interfaces of its own; the
gate is then attached but sees no traffic. So one packet is sent to each address of an enforced pod,
and one of its gates must have dropped it. Where none has, a capture inside the pod separates two
cases: the packet arrived, so the gate is bypassed; or it did not, so the host cannot reach the pod
at all, which is no bypass.

Pods in audit are not tested: the packet would arrive.
"""

import asyncio
import dataclasses
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

import structlog

from agent import tasks
from agent.backoff import Backoff, no_jitter
from agent.gates.metrics import GateMetrics
from agent.linux import packets
from agent.linux.pod_network import PodNetworkReader
from agent.logs import Event
from agent.pods.pod_state import PathTestRecord, PathTestResult, PodState
from agent.pods.store import PodStore
from bpf import abi, path_tests
from bpf.path_tests import PathTestCounters
from probes.netns import Netns, NetnsGoneError

log = structlog.get_logger(__name__)

# A packet leaves at once unless the neighbour has to be resolved first: ARP takes microseconds on a
# veth, more on a busy node. After these waits the same packet is sent again, then captured.
_WAITS_SECONDS = (0.02, 0.2)
_WITNESS_SECONDS = 0.5

# Paths change with routes and with the CNI's programs, and no message reports it. So an older
# result is tested again at the reconciler's next pass over the pod, which comes at each resync.
_CONFIRMED_FOR_SECONDS = 45
# A pod's network is removed in steps, often its routes before its interface. So a result that
# differs from the one before counts if the interface exists this much later: network plugins need
# milliseconds.
_REMOVAL_SECONDS = 1.0
# Bypasses end within moments (another program takes its own away) or stay (the CNI routes so).
_REPEAT_BASE_SECONDS, _REPEAT_CAP_SECONDS = 0.5, 60.0
# Enough for an IPv6 header and the start of a TCP header.
_HEADERS_BYTES = 64
# A test without an answer takes most of a second and little CPU. Where the CNI blocks the host
# from all of its pods, no test has an answer: then those that wait for their condition come first.
_FIRST_AT_ONCE, _AGAIN_AT_ONCE = 32, 4
# No process listens there, so the kernel ignores responses.
_SOURCE_PORT = 9650


class DefaultDeny(Protocol):
    """The default-deny table."""

    async def opened(self, state: PodState) -> None:
        """Wait until it leaves the pod's interfaces to their gates, or the pod is removed."""


class PathTester:
    """Tests pods that have changed, and repeats older results."""

    def __init__(
        self,
        counters: PathTestCounters,
        store: PodStore,
        metrics: GateMetrics,
        reader: PodNetworkReader,
        default_deny: DefaultDeny,
    ) -> None:
        """store: each result is in the pod's state, which is marked there."""
        self._counters = counters
        self._store = store
        self._metrics = metrics
        self._reader = reader
        self._default_deny = default_deny
        self._queue: dict[str, PodState] = {}
        self._running: dict[str, PodState] = {}
        self._wake = asyncio.Event()
        self._repetitions: dict[str, Backoff] = {}
        """By uid of pods whose gates are bypassed, or could not be tested."""
        self._first = asyncio.Semaphore(_FIRST_AT_ONCE)
        self._again = asyncio.Semaphore(_AGAIN_AT_ONCE)

    def enqueue(self, state: PodState) -> None:
        """Test the pod soon, if it is enforced and has no recent result."""
        if not state.is_path_tested:
            # Once it is enforced again, its first result counts as new.
            state.path_test = None
        elif not _is_fresh(state):
            self._queue[state.pod.uid] = state
            self._wake.set()

    def repeat(self, ifindexes: Collection[int]) -> None:
        """Test pods again at once whose gates on these interfaces were attached again."""
        for state in self._store.states():
            if state.is_path_tested and not state.gates.keys().isdisjoint(ifindexes):
                self._queue[state.pod.uid] = state
                self._wake.set()

    async def run(self) -> None:
        """Test what is in the queue until cancelled."""
        # Tests that a failed run has cancelled.
        self._queue = self._running | self._queue
        self._running = {}
        if self._queue:
            self._wake.set()
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for uid in self._queue.keys() - self._running.keys():
                    state = self._queue.pop(uid)
                    if self._store.get(uid) is not state:
                        continue
                    self._running[uid] = state
                    slots = self._again if state.path_test else self._first
                    group.create_task(self._test(state, slots))

    async def _test(self, state: PodState, slots: asyncio.Semaphore) -> None:
        async with slots:
            tested = await self._try(state)
        if tested and await self._is_removed(state.path_test, tested):
            tested = None
        del self._running[state.pod.uid]
        is_current = self._store.get(state.pod.uid) is state
        if is_current and tested and state.is_path_tested and tested.matches(state):
            self._record(state, tested)
        if self._queue:
            self._wake.set()

    async def _try(self, state: PodState) -> PathTestRecord | None:
        """None if the pod ended meanwhile, or no longer has gates."""
        netns, mode = state.gated_netns, state.pod.mode
        gates = frozenset(state.gates)
        if netns is None:
            return None
        results = {}
        # One after the other: the gate's counter does not show to which address a packet went.
        for address in state.own_addresses:
            path = _Path(
                self._counters,
                netns,
                ipaddress.ip_address(address),
                gates,
                opened=lambda: self._default_deny.opened(state),
            )
            try:
                results[address] = await path.test()
            except NetnsGoneError:
                return None
            except OSError as error:
                log.error(Event.PATH_TEST_FAILED, pod=state.pod.full_name, error=str(error))
                results[address] = PathTestResult.FAILED
        admitted = self._counters.probes_admitted_by(gates)
        before = state.path_test
        admitted_before = before.probes_admitted if before and before.netns == netns else 0
        return PathTestRecord(
            netns,
            mode,
            gates,
            results,
            tested_at=time.monotonic(),
            probes_admitted=admitted,
            is_kubelet_seen=admitted > admitted_before,
        )

    async def _is_removed(self, before: PathTestRecord | None, tested: PathTestRecord) -> bool:
        """Whether packets did not arrive because the pod's network is being removed."""
        if set(tested.results.values()) <= {PathTestResult.CONFIRMED}:
            return False
        if before and before.results != tested.results:
            await asyncio.sleep(_REMOVAL_SECONDS)
        if not tested.netns.exists():
            return True
        return not all([await self._reader.exists(ifindex) for ifindex in tested.gates])

    def _record(self, state: PodState, tested: PathTestRecord) -> None:
        pod = state.pod
        self._plan_repetition(state, tested)
        before = state.path_test
        if before and before.netns == tested.netns and pod.is_deleting:
            tested = _while_deleting(before, tested)
        state.path_test = tested
        for address, result in tested.results.items():
            self._metrics.path_tests.labels(result.value).inc()
            if before is None or before.results.get(address) is not result:
                fields = {"pod": pod.full_name, "address": address, "result": result.value}
                if result is PathTestResult.BYPASSED:
                    log.error(Event.GATE_BYPASSED, **fields)
                else:
                    log.info(Event.PATH_TESTED, **fields)
        self._store.in_force.mark(pod.uid)

    def _plan_repetition(self, state: PodState, tested: PathTestRecord) -> None:
        """Test again soon what may be over in a moment, so that the condition follows."""
        uid = state.pod.uid
        if tested.worst not in (PathTestResult.BYPASSED, PathTestResult.FAILED):
            self._repetitions.pop(uid, None)
            return
        self._repetitions = {u: b for u, b in self._repetitions.items() if self._store.get(u)}
        backoff = self._repetitions.setdefault(
            uid,
            Backoff(
                base_seconds=_REPEAT_BASE_SECONDS,
                cap_seconds=_REPEAT_CAP_SECONDS,
                jitter=no_jitter,
            ),
        )
        asyncio.get_running_loop().call_later(
            backoff.next_seconds(), self._repeat_one, uid, tested.netns
        )

    def _repeat_one(self, uid: str, netns: Netns) -> None:
        state = self._store.get(uid)
        if state and state.gated_netns == netns:
            self.enqueue(state)


def _while_deleting(before: PathTestRecord, tested: PathTestRecord) -> PathTestRecord:
    """The result of a pod that is being deleted: what no longer arrives is as it was before.

    Its network may be on the way out, and the kubelet no longer sends all of its probes.
    """
    results = {
        address: before.results.get(address, result)
        if result is PathTestResult.UNREACHABLE
        else result
        for address, result in tested.results.items()
    }
    is_seen = before.is_kubelet_seen or tested.is_kubelet_seen
    return dataclasses.replace(tested, results=results, is_kubelet_seen=is_seen)


def _is_fresh(state: PodState) -> bool:
    tested = state.current_path_test
    return (
        tested is not None
        and tested.worst in (PathTestResult.CONFIRMED, PathTestResult.UNREACHABLE)
        and time.monotonic() - tested.tested_at < _CONFIRMED_FOR_SECONDS
    )


@dataclasses.dataclass(slots=True)
class _Path:
    """The path from the host to one address of a pod."""

    gates: PathTestCounters
    netns: Netns
    address: abi.IPAddress
    ifindexes: Collection[int]
    opened: Callable[[], Awaitable[None]]
    """Waits until podgate's own rule set does not drop the packets."""
    sequence: int = dataclasses.field(default_factory=lambda: int.from_bytes(os.urandom(4)))
    has_route: bool = False
    """Whether the host has one for it."""
    is_denied: bool = False
    """Whether a rule set of the host dropped the last packet."""

    async def test(self) -> PathTestResult:
        """Raises NetnsGoneError when the pod ends meanwhile, and OSError."""
        counted_before = self.gates.dropped_by(self.ifindexes)

        def is_counted() -> bool:
            return self.gates.dropped_by(self.ifindexes) > counted_before

        for seconds in _WAITS_SECONDS:
            self._send()
            if is_counted():
                return PathTestResult.CONFIRMED
            if not self.has_route:
                return PathTestResult.UNREACHABLE
            if self.is_denied:
                await self.opened()
            else:
                await asyncio.sleep(seconds)
        await self.opened()
        capture = packets.open_capture(self.netns, self.address.version, self.sequence)
        try:
            self._send()
            if is_counted():
                return PathTestResult.CONFIRMED
            has_arrived = await self._arrives(capture)
        finally:
            await tasks.close_in_thread(capture.close)
        # The gate may have dropped a delayed packet by now.
        if is_counted():
            return PathTestResult.CONFIRMED
        return PathTestResult.BYPASSED if has_arrived else PathTestResult.UNREACHABLE

    def _send(self) -> None:
        try:
            packets.send_syn(
                self.address,
                source_port=_SOURCE_PORT,
                port=path_tests.PORT,
                sequence=self.sequence,
            )
            self.has_route, self.is_denied = True, False
        except OSError as error:
            # EPERM: dropped by a rule set of the host. The default-deny table is one until it has
            # the new gate, for a second where many pods start.
            self.is_denied = error.errno == errno.EPERM
            self.has_route = self.has_route or self.is_denied
            log.debug(Event.PATH_TEST_NOT_SENT, address=str(self.address), error=str(error))

    async def _arrives(self, capture: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_WITNESS_SECONDS):
                while True:
                    packet = await loop.sock_recv(capture, _HEADERS_BYTES)
                    if packets.has_sequence(packet, self.address.version, self.sequence):
                        return True
        except TimeoutError:
            return False
