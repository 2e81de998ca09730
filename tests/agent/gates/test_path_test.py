"""Which pods are path tested, and what the result is; packets and the gate's counter in memory."""

import asyncio
import collections
import contextlib
import dataclasses
import errno
import ipaddress
import pathlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Any

import msgspec
import pytest
import structlog

from agent.gates import path_test
from agent.gates.metrics import GateMetrics
from agent.gates.path_test import PathTester
from agent.linux import packets
from agent.linux.pod_network import HostInterface
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.pod_state import AddressClaims, PathTestRecord, PathTestResult, PodState
from agent.pods.store import PodStore
from bpf.abi import IPAddress
from bpf.verdicts import Mode
from probes.netns import Netns, NetnsGoneError
from tests import polling

V4, V6 = "198.18.0.7", "fd00:18::7"
IFINDEX = 7
CONFIRMED, BYPASSED = PathTestResult.CONFIRMED, PathTestResult.BYPASSED
UNREACHABLE, FAILED = PathTestResult.UNREACHABLE, PathTestResult.FAILED


@dataclasses.dataclass
class Path:
    """Where the SYNs to one address go. counted_from: the first one that the gate drops."""

    counted_from: float = float("inf")
    arrives: bool = False
    has_route: bool = True
    rejected: int = 0
    """How many a rule set of the host still drops when they are sent."""
    gate: int = IFINDEX
    sent: int = 0
    is_foreign: bool = False
    """Whether only another program's packets arrive."""


class Host:
    """The host's paths by address, the gates' counter, and captures inside of pods."""

    def __init__(self, namespaces: pathlib.Path) -> None:
        self.namespaces = namespaces
        self.vanished: set[int] = set()
        """Interfaces that no longer exist."""
        self.is_open = asyncio.Event()
        """Whether the default-deny table leaves the interfaces to their gates."""
        self.is_open.set()
        self.paths: dict[str, Path] = {}
        self.dropped = collections.Counter[int]()
        self.probes_admitted = 0
        self.sent: list[str] = []
        self.capture_error: Exception | None = None
        self.captures: list[socket.socket] = []

    def dropped_by(self, ifindexes: Collection[int]) -> int:
        return sum(self.dropped[ifindex] for ifindex in ifindexes)

    def probes_admitted_by(self, ifindexes: Collection[int]) -> int:
        return self.probes_admitted

    async def exists(self, ifindex: int) -> bool:
        return ifindex not in self.vanished

    async def opened(self, state: PodState) -> None:
        await self.is_open.wait()

    def netns(self, name: str) -> Netns:
        path = self.namespaces / name
        path.touch()
        status = path.stat()
        return Netns(str(path), status.st_dev, status.st_ino)

    def send_syn(self, address: IPAddress, *, source_port: int, port: int, sequence: int) -> None:
        path = self.paths[str(address)]
        if not path.has_route:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        if path.rejected:
            path.rejected -= 1
            raise OSError(errno.EPERM, "Operation not permitted")
        self.sent.append(str(address))
        if not self.is_open.is_set():
            return
        path.sent += 1
        if path.sent >= path.counted_from:
            self.dropped[path.gate] += 1
        if not (path.arrives and self.captures):
            return
        source = ipaddress.ip_address("198.18.0.1" if address.version == 4 else "fd00:18::1")
        # The first is another program's.
        for number in (sequence ^ 1, sequence)[: 1 if path.is_foreign else 2]:
            packet = packets.tcp_packet(
                source.packed,
                address.packed,
                ports=(source_port, port),
                flags=packets.SYN,
                sequence=number,
            )
            with contextlib.suppress(OSError):  # the previous capture is closed
                self.captures[-1].send(packet)

    def open_capture(self, netns: Netns, version: int, sequence: int) -> socket.socket:
        if self.capture_error:
            raise self.capture_error
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (ours, theirs):
            end.setblocking(False)
        self.captures.append(theirs)
        return ours


class Node:
    """A store, the tester, and one pod behind interface 7."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.store = PodStore(Conditions())
        self.metrics = GateMetrics(self.store)
        self.changes = self.store.in_force.subscribe()
        kernel: Any = host
        self.tester = PathTester(kernel, self.store, self.metrics, kernel, kernel)

    def add(self, name: str = "web", *, mode: Mode = Mode.ENFORCE, addresses: str = V4) -> PodState:
        self.store.set_pod(Pod(uid=name, namespace="tests", name=name, mode=mode))
        state = self.store.pods[name]
        state.netns = state.gated_netns = self.host.netns(name)
        confirmed = tuple(ipaddress.ip_address(address) for address in addresses.split())
        state.claims = AddressClaims(confirmed)
        for address in addresses.split():
            gate = self.host.paths.setdefault(address, Path()).gate
            state.gates[gate] = HostInterface(gate, f"veth{gate}")
        return state

    async def tested(self, state: PodState) -> dict[str, PathTestResult]:
        """The results, once the pod is marked."""
        self.tester.enqueue(state)
        assert await self.changes.next() == [state.pod.uid]
        assert state.path_test is not None
        return state.path_test.results

    async def idle(self) -> None:
        """Until every test that was enqueued has ended."""
        self.host.paths[V6] = Path(counted_from=1, gate=8)
        await self.tested(self.add("other", addresses=V6))
        await polling.until("all tests have ended", lambda: not self.tester._running)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Node"]:
        task = asyncio.create_task(self.tester.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Host]:
    made = Host(tmp_path)
    monkeypatch.setattr(packets, "send_syn", made.send_syn)
    monkeypatch.setattr(packets, "open_capture", made.open_capture)
    monkeypatch.setattr(path_test, "_WAITS_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(path_test, "_WITNESS_SECONDS", 0.05)
    monkeypatch.setattr(path_test, "_REMOVAL_SECONDS", 0.02)
    yield made
    for capture in made.captures:
        capture.close()


@pytest.fixture
async def node(host: Host) -> AsyncIterator[Node]:
    async with Node(host).running() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "expected", "sent"),
    [
        pytest.param(Path(counted_from=1), CONFIRMED, 1, id="first SYN dropped"),
        pytest.param(Path(counted_from=2), CONFIRMED, 2, id="second SYN dropped"),
        pytest.param(Path(counted_from=3), CONFIRMED, 3, id="captured SYN dropped"),
        pytest.param(Path(arrives=True), BYPASSED, 3, id="arrives"),
        pytest.param(
            Path(arrives=True, is_foreign=True), UNREACHABLE, 3, id="only another's arrives"
        ),
        pytest.param(Path(), UNREACHABLE, 3, id="lost"),
        pytest.param(Path(has_route=False), UNREACHABLE, 0, id="no route"),
        pytest.param(
            Path(counted_from=1, rejected=1), CONFIRMED, 1, id="rejected by the default-deny table"
        ),
        pytest.param(Path(rejected=9), UNREACHABLE, 0, id="rejected by a firewall"),
    ],
)
@pytest.mark.parametrize("address", [V4, V6])
async def test_result_of_a_path(
    node: Node, path: Path, expected: PathTestResult, sent: int, address: str
) -> None:
    node.host.paths[address] = path = dataclasses.replace(path)
    assert await node.tested(node.add(addresses=address)) == {address: expected}
    assert path.sent == sent


async def test_a_drop_that_is_counted_during_the_capture_confirms_the_path(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packet that had to wait for its neighbour's resolution."""
    state = node.add()

    async def arrive_late(path: Any, capture: socket.socket) -> bool:
        node.host.dropped[IFINDEX] += 1
        return True

    monkeypatch.setattr(path_test._Path, "_arrives", arrive_late)
    assert await node.tested(state) == {V4: CONFIRMED}


async def test_default_deny_table_that_is_slow_makes_no_pod_unreachable(node: Node) -> None:
    """Its transaction takes a second where many pods start, and drops the test meanwhile."""
    state = node.add()
    node.host.paths[V4] = Path(counted_from=1)
    node.host.is_open.clear()
    node.tester.enqueue(state)
    asyncio.get_running_loop().call_later(0.1, node.host.is_open.set)
    assert await node.changes.next() == ["web"]
    assert state.path_test is not None
    assert state.path_test.results == {V4: CONFIRMED}


async def test_packet_that_the_default_deny_table_drops_is_sent_again_once_it_is_open(
    node: Node,
) -> None:
    state = node.add()
    node.host.paths[V4] = Path(counted_from=1, rejected=1)
    node.host.is_open.clear()
    node.tester.enqueue(state)
    asyncio.get_running_loop().call_later(0.1, node.host.is_open.set)
    assert await node.changes.next() == ["web"]
    assert node.host.sent == [V4]
    assert not node.host.captures


async def test_every_confirmed_address_is_tested_one_after_the_other(node: Node) -> None:
    state = node.add(addresses=f"{V4} {V6}")
    node.host.paths[V4] = Path(counted_from=1)
    node.host.paths[V6] = Path(arrives=True)
    assert await node.tested(state) == {V4: CONFIRMED, V6: BYPASSED}
    assert node.host.sent == [V4, V6, V6, V6]
    assert state.path_test is not None
    assert state.path_test.worst is BYPASSED
    metric = node.metrics.path_tests
    assert [metric.labels(kind)._value.get() for kind in (CONFIRMED, BYPASSED)] == [1, 1]


async def test_the_kubelet_is_seen_if_it_was_admitted_since_the_test_before(node: Node) -> None:
    state = node.add()
    seen = []
    for admitted in (0, 3, 3, 4):
        node.host.probes_admitted = admitted
        await node.tested(state)
        assert state.path_test is not None
        seen.append(state.path_test.is_kubelet_seen)
        state.path_test = dataclasses.replace(state.path_test, tested_at=time.monotonic() - 100)
    assert seen == [False, True, False, True]


async def test_a_bypassed_gate_is_an_error_and_an_unchanged_result_no_log(node: Node) -> None:
    state = node.add()
    node.host.paths[V4] = Path(arrives=True)
    with structlog.testing.capture_logs() as logs:
        await node.tested(state)
        await node.tested(state)
    assert [(line["event"], line["log_level"]) for line in logs] == [(Event.GATE_BYPASSED, "error")]


async def test_new_results_are_logged_for_each_address(node: Node) -> None:
    state = node.add(addresses=f"{V4} {V6}")
    node.host.paths[V4] = Path(counted_from=1)
    state.path_test = _record(state, UNREACHABLE, age=46)
    with structlog.testing.capture_logs() as logs:
        await node.tested(state)
    assert [
        (line["event"], line["log_level"], line["pod"], line["address"], line["result"])
        for line in logs
        if line["log_level"] != "debug"
    ] == [(Event.PATH_TESTED, "info", "tests/web", V4, "confirmed")]


async def test_connections_to_a_previous_sandbox_are_none_of_this_one(node: Node) -> None:
    state = node.add()
    record = dataclasses.replace(_record(state, CONFIRMED, age=46), probes_admitted=1)
    for netns, is_seen in ((state.gated_netns, False), (Netns("/run/netns/old", 4, 101), True)):
        assert netns is not None
        state.path_test = dataclasses.replace(record, netns=netns)
        node.host.probes_admitted = 1
        node.tester.enqueue(state)
        node.tester.repeat({IFINDEX})
        await node.changes.next()
        await polling.until("its end", lambda: not node.tester._running)
        assert state.path_test is not None
        assert (state.path_test.is_kubelet_seen, state.path_test.probes_admitted) == (is_seen, 1)


async def test_pod_that_is_queued_during_its_test_is_tested_again_after_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_continue = asyncio.Event()

    async def wait(path: Any, capture: socket.socket) -> bool:
        await may_continue.wait()
        return False

    monkeypatch.setattr(path_test._Path, "_arrives", wait)
    state = node.add()
    node.tester.enqueue(state)
    await polling.until("it is captured", lambda: len(node.host.sent) == 3)
    node.tester.repeat({IFINDEX})
    await asyncio.sleep(0)
    node.host.paths[V4] = Path(counted_from=1)
    may_continue.set()
    for result in (UNREACHABLE, CONFIRMED):
        assert await node.changes.next() == ["web"]
        assert state.path_test is not None
        assert state.path_test.results == {V4: result}


async def test_test_that_a_failed_run_cancelled_is_made_by_the_next_one(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_continue = asyncio.Event()

    async def wait(path: Any, capture: socket.socket) -> bool:
        await may_continue.wait()
        return True

    monkeypatch.setattr(path_test._Path, "_arrives", wait)
    node = Node(host)
    state = node.add()
    async with node.running():
        node.tester.enqueue(state)
        await polling.until("it is captured", lambda: len(host.sent) == 3)
    may_continue.set()
    async with node.running():
        assert await node.changes.next() == ["web"]
    assert state.path_test is not None
    assert state.path_test.results == {V4: BYPASSED}


@pytest.mark.parametrize(("is_first", "at_once"), [(True, 10), (False, 4)])
async def test_tests_without_a_result_are_made_side_by_side(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_first: bool, at_once: int
) -> None:
    """Repeated ones leave time to others."""
    may_continue = asyncio.Event()
    waiting: list[str] = []

    async def wait(path: Any, capture: socket.socket) -> bool:
        waiting.append(str(path.address))
        await may_continue.wait()
        return False

    monkeypatch.setattr(path_test._Path, "_arrives", wait)
    for number in range(10):
        state = node.add(f"pod{number}", addresses=f"198.18.0.{number + 10}")
        if not is_first:
            state.path_test = _record(state, UNREACHABLE, age=46)
        node.tester.enqueue(state)
    await polling.until("all that may run", lambda: len(waiting) == at_once)
    await asyncio.sleep(0.02)
    assert len(waiting) == at_once
    may_continue.set()
    await polling.until("the others", lambda: len(waiting) == 10)


async def test_a_capture_that_cannot_be_opened_is_a_failed_test(node: Node) -> None:
    state = node.add()
    node.host.capture_error = OSError(errno.EPERM, "Operation not permitted")
    assert await node.tested(state) == {V4: FAILED}


async def test_a_pod_that_ends_during_its_test_has_no_result(node: Node) -> None:
    state = node.add()
    node.host.capture_error = NetnsGoneError("/run/netns/web does not exist.")
    node.tester.enqueue(state)
    await polling.until("it was tried", lambda: len(node.host.sent) == 2)
    other = node.add("other", addresses=V6)
    node.host.paths[V6] = Path(counted_from=1)
    await node.tested(other)
    assert state.path_test is None


@pytest.mark.parametrize("path", [Path(has_route=False), Path()], ids=["no route", "lost"])
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda host: host.vanished.add(IFINDEX), id="no interface"),
        pytest.param(lambda host: (host.namespaces / "web").unlink(), id="no namespace"),
    ],
)
async def test_a_pod_whose_network_is_gone_has_no_result(
    node: Node, path: Path, end: Callable[[Host], object]
) -> None:
    node.host.paths[V4] = dataclasses.replace(path)
    state = node.add()
    end(node.host)
    node.tester.enqueue(state)
    await node.idle()
    assert state.path_test is None


async def test_a_path_that_breaks_since_the_network_is_being_removed_keeps_its_result(
    node: Node,
) -> None:
    """Some CNIs delete the pod's route before its interface."""
    node.host.paths[V4] = Path(has_route=False)
    state = node.add()
    state.path_test = before = _record(state, CONFIRMED, age=46)
    asyncio.get_running_loop().call_later(0.01, node.host.vanished.add, IFINDEX)
    node.tester.enqueue(state)
    await node.idle()
    assert state.path_test is before


async def test_a_path_that_breaks_while_the_network_stays_is_reported(node: Node) -> None:
    node.host.paths[V4] = Path(has_route=False)
    state = node.add()
    state.path_test = _record(state, CONFIRMED, age=46)
    assert await node.tested(state) == {V4: UNREACHABLE}


@pytest.mark.parametrize(
    ("before", "path", "after"),
    [
        (CONFIRMED, Path(), CONFIRMED),
        (UNREACHABLE, Path(), UNREACHABLE),
        (UNREACHABLE, Path(counted_from=1), CONFIRMED),
        (CONFIRMED, Path(arrives=True), BYPASSED),
        (None, Path(), UNREACHABLE),
    ],
)
async def test_a_pod_that_is_being_deleted_becomes_no_unreachable_one(
    node: Node, before: PathTestResult | None, path: Path, after: PathTestResult
) -> None:
    """What it was stays, for its preStop hook; without a result, this agent may have restarted."""
    node.host.paths[V4] = dataclasses.replace(path)
    state = node.add()
    state.path_test = _record(state, before, age=46) if before else None
    node.store.set_pod(msgspec.structs.replace(state.pod, is_deleting=True))
    assert await node.tested(state) == {V4: after}


async def test_the_kubelet_that_reached_a_pod_reaches_it_while_it_is_deleted(node: Node) -> None:
    """It no longer sends liveness probes then, so the absence of connections shows nothing."""
    state = node.add()
    reached = dataclasses.replace(_record(state, UNREACHABLE, age=46), is_kubelet_seen=True)
    state.path_test = reached
    node.store.set_pod(msgspec.structs.replace(state.pod, is_deleting=True))
    await node.tested(state)
    assert state.path_test is not reached
    assert state.path_test.is_kubelet_seen


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda node, state: node.store.remove_pod("web"), id="removed"),
        pytest.param(
            lambda node, state: setattr(state, "gated_netns", Netns("/run/netns/new", 4, 101)),
            id="another sandbox",
        ),
        pytest.param(lambda node, state: state.gates.clear(), id="no gates"),
    ],
)
async def test_result_of_a_pod_that_changed_meanwhile_is_dropped(
    node: Node, change: Callable[[Node, PodState], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = node.add()
    started = asyncio.Event()
    may_continue = asyncio.Event()

    async def wait(path: Any, capture: socket.socket) -> bool:
        started.set()
        await may_continue.wait()
        return True

    monkeypatch.setattr(path_test._Path, "_arrives", wait)
    node.tester.enqueue(state)
    await started.wait()
    change(node, state)
    may_continue.set()
    node.host.paths[V6] = Path(counted_from=1)
    await node.tested(node.add("other", addresses=V6))
    assert state.path_test is None


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.AUDIT])
async def test_a_pod_that_is_not_enforced_is_not_tested_and_loses_its_result(
    host: Host, mode: Mode
) -> None:
    node = Node(host)
    state = node.add(mode=mode)
    state.path_test = _record(state, CONFIRMED, age=0)
    node.tester.enqueue(state)
    await _is_idle(node)
    assert state.path_test is None


@pytest.mark.parametrize(
    ("result", "age", "is_repeated"),
    [
        (CONFIRMED, 0, False),
        (UNREACHABLE, 0, False),
        (CONFIRMED, 46, True),
        (UNREACHABLE, 46, True),
        (BYPASSED, 0, True),
        (FAILED, 0, True),
    ],
)
async def test_recent_good_results_are_not_repeated(
    host: Host, result: PathTestResult, age: int, is_repeated: bool
) -> None:
    node = Node(host)
    state = node.add()
    host.paths[V4] = Path(counted_from=1)
    state.path_test = _record(state, result, age=age)
    node.tester.enqueue(state)
    if not is_repeated:
        await _is_idle(node)
        return
    async with node.running():
        assert await node.changes.next() == ["web"]
        assert host.sent == [V4]


async def test_pods_without_a_result_do_not_wait_for_repeated_tests(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_continue = asyncio.Event()

    async def wait(path: Any, capture: socket.socket) -> bool:
        await may_continue.wait()
        return False

    monkeypatch.setattr(path_test._Path, "_arrives", wait)
    for number in range(10):
        state = node.add(f"old-{number}")
        state.path_test = _record(state, UNREACHABLE, age=100)
        node.tester.enqueue(state)
    node.host.paths[V6] = Path(counted_from=1, gate=8)
    assert await node.tested(node.add("new", addresses=V6)) == {V6: CONFIRMED}
    may_continue.set()
    repeated: set[str] = set()
    while len(repeated) < 10:
        repeated |= set(await node.changes.next())


def _record(state: PodState, result: PathTestResult, *, age: float) -> PathTestRecord:
    assert state.gated_netns is not None
    tested_at = time.monotonic() - age
    results = dict.fromkeys(state.own_addresses, result)
    return PathTestRecord(
        state.gated_netns, state.pod.mode, frozenset(state.gates), results, tested_at
    )


async def _is_idle(node: Node) -> None:
    """Fails if a test of any pod is sent before another pod's, which is queued now."""
    node.host.paths[V6] = Path(counted_from=1)
    async with node.running():
        await node.tested(node.add("other", addresses=V6))
    assert node.host.sent == [V6]


async def test_pod_is_tested_again_at_once_when_its_gate_was_put_back(node: Node) -> None:
    state = node.add()
    node.host.paths[V4] = Path(counted_from=1)
    await node.tested(state)
    node.host.paths[V4] = Path(arrives=True)
    node.tester.enqueue(state)
    node.tester.repeat({IFINDEX + 1})
    await node.idle()
    assert state.path_test is not None
    assert state.path_test.results == {V4: CONFIRMED}
    node.tester.repeat({IFINDEX})
    assert await node.changes.next() == ["web"]
    assert state.path_test.results == {V4: BYPASSED}


async def test_bypass_is_tested_again_until_it_has_ended(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_test, "_REPEAT_BASE_SECONDS", 0.02)
    state = node.add()
    node.host.paths[V4] = Path(arrives=True)
    assert await node.tested(state) == {V4: BYPASSED}
    node.host.paths[V4] = Path(counted_from=1)

    def is_confirmed() -> bool:
        return state.path_test is not None and state.path_test.results == {V4: CONFIRMED}

    await polling.until("the path confirmed", is_confirmed)


async def test_a_path_that_works_again_is_reported_at_once(node: Node) -> None:
    node.host.paths[V4] = Path(counted_from=1)
    state = node.add()
    state.path_test = _record(state, UNREACHABLE, age=46)
    node.host.vanished.add(IFINDEX)
    assert await node.tested(state) == {V4: CONFIRMED}
