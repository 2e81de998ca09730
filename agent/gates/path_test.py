"""The self-test: whether what the node sends to a pod goes through the pod's gate.

A CNI may go round the veth (bpf_redirect_peer) or route the node through interfaces of its own;
then a gate stands and judges nothing. So one packet is sent to each address of an enforced pod, and
one of its gates must have refused it. Where none has, a look inside the pod tells the two cases
apart: the packet arrived, so the gate is bypassed; or it did not, so the node cannot reach the pod
at all, which is nobody's hole.

In audit the packet would arrive, so nothing is tested there.
"""

import asyncio
import dataclasses
import enum
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Collection

import structlog

from agent.admin.report import PathStatus
from agent.linux import packets
from agent.metrics import Metrics
from agent.pods.conditions import FALSE, TRUE
from agent.pods.pod_state import IsolationStatus, PodState
from bpf import abi, path_tests
from bpf.path_tests import PathTestCounters
from bpf.verdicts import Mode
from probes.netns import Netns, NetnsGoneError

log = structlog.get_logger(__name__)

# A packet leaves at once unless the neighbour has to be asked for first: ARP takes microseconds on
# a veth, more on a busy node. After these waits the same packet is sent again, then witnessed.
_WAITS_SECONDS = (0.02, 0.2)
_WITNESS_SECONDS = 0.5

# Paths change with routes and with the CNI's programs, of which nothing tells. So what is older is
# tested again at the reconciler's next look, of which every pod gets one now and then.
_CONFIRMED_FOR_SECONDS = 45
# No process listens there, so the kernel ignores responses.
_SOURCE_PORT = 9650
# Enough for an IPv6 header and the beginning of TCP's.
_HEADERS_BYTES = 64
# A test without an answer takes most of a second and hardly any CPU. Where the CNI keeps the node
# away from all of its pods none has one: then those that wait for their condition come first.
_FIRST_AT_ONCE, _AGAIN_AT_ONCE = 32, 4


class PathTestResult(enum.StrEnum):
    """What became of a self-test."""

    CONFIRMED = "confirmed"
    BYPASSED = "bypassed"
    UNREACHABLE = "unreachable"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class PathTestRecord:
    """What a self-test found for a pod as it was then."""

    netns: Netns
    mode: Mode
    gates: frozenset[int]
    results: dict[str, PathTestResult]
    """By address."""

    @property
    def worst(self) -> PathTestResult | None:
        """None where there was no address to test."""
        found = set(self.results.values())
        order = (
            PathTestResult.BYPASSED,
            PathTestResult.FAILED,
            PathTestResult.UNREACHABLE,
            PathTestResult.CONFIRMED,
        )
        return next((result for result in order if result in found), None)

    def is_about(self, guarded: PodState) -> bool:
        """Whether the pod still is as it was tested."""
        return (
            self.netns == guarded.gated_netns
            and self.mode is guarded.pod.mode
            and self.gates == guarded.gates.keys()
            and self.results.keys() == set(guarded.own_addresses)
        )


class PathTester:
    """Tests pods that have changed, and every one again after some minutes."""

    def __init__(
        self, gates: PathTestCounters, metrics: Metrics, on_tested: Callable[[str], None]
    ) -> None:
        """on_tested: called with a pod's uid when `judge` has something new to say of it."""
        self._gates = gates
        self._metrics = metrics
        self._on_tested = on_tested
        self._tested: dict[str, tuple[PathTestRecord, float]] = {}
        self._trusted: dict[str, Netns] = {}
        """Sandboxes of which it was once said that no path goes round their gates; latches."""
        self._wanted: dict[str, PodState] = {}
        self._running: dict[str, PodState] = {}
        self._wake = asyncio.Event()
        self._first = asyncio.Semaphore(_FIRST_AT_ONCE)
        self._again = asyncio.Semaphore(_AGAIN_AT_ONCE)

    def want(self, guarded: PodState) -> None:
        """Test the pod soon, if it is enforced and there is anything new to find out."""
        if not is_testable(guarded):
            # When it is enforced again, that is news.
            self._tested.pop(guarded.pod.uid, None)
            self._metrics.paths.pop(guarded.pod.uid, None)
        elif not self._is_fresh(guarded):
            self._wanted[guarded.pod.uid] = guarded
            self._wake.set()

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        for known in (self._tested, self._trusted, self._wanted, self._running):
            known.pop(uid, None)
        self._metrics.paths.pop(uid, None)

    def of(self, guarded: PodState) -> PathTestRecord | None:
        """What was found for the pod as it is now."""
        tested, _ = self._tested.get(guarded.pod.uid, (None, 0.0))
        return tested if tested and tested.is_about(guarded) else None

    def status(self, guarded: PodState) -> list[PathStatus]:
        """The same for `podgate status`."""
        tested = self.of(guarded)
        results = tested.results if tested else {}
        return [PathStatus(address=address, result=results[address].value) for address in results]

    def judge(self, guarded: PodState, isolation: IsolationStatus) -> IsolationStatus | None:
        """What to say of a pod whose gates stand; None while its first self-test is under way."""
        if isolation.status != TRUE or not is_testable(guarded):
            return isolation
        tested = self.of(guarded)
        is_trusted = self._trusted.get(guarded.pod.uid) == guarded.gated_netns
        if tested is None:
            return isolation if is_trusted else None
        if tested.worst is None and guarded.claims.is_settling and not is_trusted:
            return None
        if tested.worst is PathTestResult.BYPASSED and not is_trusted:
            return IsolationStatus(FALSE, "GateBypassed", f"{_doubt(tested)} {isolation.message}")
        if tested.worst is not None and guarded.gated_netns is not None:
            self._trusted[guarded.pod.uid] = guarded.gated_netns
        if tested.worst in (None, PathTestResult.CONFIRMED):
            return isolation
        return dataclasses.replace(isolation, message=f"{isolation.message} {_doubt(tested)}")

    async def run(self) -> None:
        """Test what is wanted, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for uid in self._wanted.keys() - self._running.keys():
                    self._running[uid] = guarded = self._wanted.pop(uid)
                    slots = self._again if uid in self._tested else self._first
                    group.create_task(self._test(guarded, slots))

    def _is_fresh(self, guarded: PodState) -> bool:
        tested, when = self._tested.get(guarded.pod.uid, (None, 0.0))
        return (
            tested is not None
            and tested.is_about(guarded)
            and tested.worst in (PathTestResult.CONFIRMED, PathTestResult.UNREACHABLE)
            and time.monotonic() - when < _CONFIRMED_FOR_SECONDS
        )

    async def _test(self, guarded: PodState, slots: asyncio.Semaphore) -> None:
        async with slots:
            tested = await self._try(guarded)
        is_current = self._running.pop(guarded.pod.uid, None) is guarded
        if is_current and tested and is_testable(guarded) and tested.is_about(guarded):
            self._note(guarded, tested)
        if self._wanted:
            self._wake.set()

    async def _try(self, guarded: PodState) -> PathTestRecord | None:
        """None when the pod ended meanwhile, or has no gates any more."""
        netns, mode = guarded.gated_netns, guarded.pod.mode
        gates = frozenset(guarded.gates)
        if netns is None:
            return None
        results = {}
        # One after the other: what a gate refused does not tell of which address it was.
        for address in guarded.own_addresses:
            path = _Path(self._gates, netns, ipaddress.ip_address(address), gates)
            try:
                results[address] = await path.test()
            except NetnsGoneError:
                return None
            except OSError as error:
                log.error("self-test failed", pod=guarded.pod.full_name, error=str(error))
                results[address] = PathTestResult.FAILED
        return PathTestRecord(netns, mode, gates, results)

    def _note(self, guarded: PodState, tested: PathTestRecord) -> None:
        pod = guarded.pod
        before, _ = self._tested.get(pod.uid, (None, 0.0))
        self._tested[pod.uid] = (tested, time.monotonic())
        self._metrics.paths[pod.uid] = [result.value for result in tested.results.values()]
        for address, result in tested.results.items():
            self._metrics.self_tests.labels(result.value).inc()
            if before is None or before.results.get(address) is not result:
                tell = log.error if result is PathTestResult.BYPASSED else log.info
                tell("self-test", pod=pod.full_name, address=address, result=result.value)
        self._on_tested(pod.uid)


def _doubt(tested: PathTestRecord) -> str:
    """One sentence about the paths with the worst result."""
    addresses = ", ".join(
        address for address, result in tested.results.items() if result is tested.worst
    )
    if tested.worst is PathTestResult.BYPASSED:
        return (
            f"The node reaches {addresses} past the gate; see how the CNI routes it, since no gate "
            "on this interface can close that way."
        )
    if tested.worst is PathTestResult.FAILED:
        return f"Not confirmed by a self-test: it failed at {addresses}, and the log says why."
    return f"Not confirmed by a self-test: what the node sends to {addresses} does not arrive."


def is_testable(guarded: PodState) -> bool:
    """Whether the pod's gates should refuse a self-test: they stand, and enforce."""
    return (
        guarded.gated_netns is not None
        and bool(guarded.gates)
        and guarded.pod.mode in (Mode.ENFORCE, Mode.STRICT)
    )


@dataclasses.dataclass(slots=True)
class _Path:
    """The way from the node to one address of a pod."""

    gates: PathTestCounters
    netns: Netns
    address: abi.IPAddress
    ifindexes: Collection[int]
    sequence: int = dataclasses.field(default_factory=lambda: int.from_bytes(os.urandom(4)))
    is_sent: bool = False
    """Whether the node had a way to send it at all."""

    async def test(self) -> PathTestResult:
        """Raises NetnsGoneError when the pod ends meanwhile, and OSError."""
        refused_before = self.gates.dropped_by(self.ifindexes)

        def is_judged() -> bool:
            return self.gates.dropped_by(self.ifindexes) > refused_before

        for seconds in _WAITS_SECONDS:
            self._send()
            if is_judged():
                return PathTestResult.CONFIRMED
            if not self.is_sent:
                return PathTestResult.UNREACHABLE
            await asyncio.sleep(seconds)
        capture = packets.open_capture(self.netns, self.address.version, self.sequence)
        try:
            self._send()
            if is_judged():
                return PathTestResult.CONFIRMED
            has_arrived = await self._hears(capture)
        finally:
            await asyncio.to_thread(capture.close)
        # Held up on its way so far, it may have been judged at last.
        if is_judged():
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
            self.is_sent = True
        except OSError as error:
            log.debug("self-test not sent", address=str(self.address), error=str(error))

    async def _hears(self, capture: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_WITNESS_SECONDS):
                while True:
                    packet = await loop.sock_recv(capture, _HEADERS_BYTES)
                    if packets.has_sequence(packet, self.address.version, self.sequence):
                        return True
        except TimeoutError:
            return False
