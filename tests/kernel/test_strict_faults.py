"""The relay is killed, hung, replaced and out of descriptors, while the kubelet probes 200 times a
second with failureThreshold 1, and another host process tries every pod each millisecond.

Only probes may fail that were in flight at that instant, or, if the relay hangs, until its
heartbeat is stale; their number is printed. No other process reaches a pod at any time.

`make test-strict` is the long form; every run of the tests has a short one.
"""

import contextlib
import dataclasses
import ipaddress
import json
import os
import pathlib
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from agent.lab.agent_process import Launch
from agent.lab.exits import has_ended
from agent.relay.targets import FIRST_HOST
from bpf import pins
from tests.conftest import fresh_lab
from tests.kernel import fleet, handshakes, loads, nodeclient, pacing
from tests.kernel.handshakes import Handshakes
from tests.kernel.nodeclient import NodeClient
from tests.kernel.secondagent import SecondAgent
from tests.kernel.strictnode import RANGE4, Node, strict_node, wait_until
from tests.polling import PATIENCE

pytestmark = pytest.mark.kernel


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """How much happens in one run."""

    kills: int
    upgrades: int
    stopped_seconds: float
    """How long a relay is kept from running, whether or not another has taken its place."""


SHORT = Scale(kills=3, upgrades=3, stopped_seconds=2)
LONG = Scale(kills=6, upgrades=10, stopped_seconds=60)
SCALE = LONG if os.environ.get("PODGATE_TEST_STRICT") else SHORT

# On emulated machines a probe takes about the square of the patience factor.
PER_SECOND = round(200 / PATIENCE**2)
# Between two faults.
PROBES_BETWEEN = PER_SECOND // 2
# bpf/src/abi.h: RELAY_BEAT_LIMIT_NS. A tick of the kernel's coarse clock comes on top.
STALE_AFTER_SECONDS = 0.3 + 0.01
PODS = 10
SLOW_SECONDS = 0.1
# The relay reserves a quarter, since it checks only every 50 ms whether there is room for more.
FEW_DESCRIPTORS = 2048
MOST_KEPT = FEW_DESCRIPTORS
PROBES = (fleet.http_probe(fleet.HTTP), fleet.tcp_probe(fleet.TCP))

Instant = tuple[float, float]


@pytest.fixture(scope="module")
def node(
    launch: Launch, installed: pins.Pins, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("strict")
    with fresh_lab() as lab, strict_node(lab, folder, launch, installed) as made:
        for name in ("witness", *(f"web{number}" for number in range(PODS))):
            number = len(made.pods) + 1
            made.add(name, number, ports=(fleet.HTTP, fleet.TCP), probes=PROBES, mode="strict")
        made.start()
        yield made


@pytest.fixture
def kubelet(node: Node) -> Iterator[NodeClient]:
    with nodeclient.node_client(node.kubelet) as made:
        yield made


class Load:
    """The kubelet's probes, and an attacker."""

    def __init__(
        self,
        node: Node,
        kubelet: NodeClient,
        paced: pacing.Pacing,
        handshakes: Handshakes,
    ) -> None:
        self._node = node
        self._kubelet = kubelet
        self._paced = paced
        self._handshakes = handshakes
        self._peers: dict[str, dict[str, list[float]]] = {}

    def go_on(self) -> None:
        """Wait until the kubelet is proxied, and for some more probes."""
        # An agent whose relays exit one after the other waits up to 8 s before the next one.
        wait_until("the kubelet proxied", self._is_proxied, patience=3)
        self._paced.wait_for_more(PROBES_BETWEEN)

    def _is_proxied(self) -> bool:
        return is_proxied(self._node, self._kubelet, self._take_peers)

    def _take_peers(self) -> dict[str, set[str]]:
        found = self._node.fleet.peer_times()
        for pod, peers in found.items():
            for peer, times in peers.items():
                self._peers.setdefault(pod, {}).setdefault(peer, []).extend(times)
        return {pod: set(peers) for pod, peers in found.items()}

    def forget_peers(self) -> None:
        self._take_peers()
        self._peers.clear()

    def check_peers(self) -> None:
        """Only the pod itself has connected to each pod since `forget_peers`."""
        self._take_peers()
        others = [
            (moment, name, peer)
            for name, pod in self._node.pods.items()
            for peer, moments in self._peers.get(name, {}).items()
            for moment in moments
            if peer not in (pod.pod.ipv4, pod.pod.ipv6)
        ]
        log = "\n".join(map(str, self._node.operator.log_lines()))
        assert others == [], f"other peers, by seconds since the epoch:\n{sorted(others)}\n{log}"

    def lost(self, instants: list[Instant]) -> tuple[int, int]:
        """How many probes failed, and how many were in flight at one of the instants.

        Ends the probes. No other may have failed.
        """
        probes = self._paced.result()
        lost = [probe for probe in probes if probe.result != pacing.OK]
        in_flight = [
            probe for probe in probes if any(probe.was_in_flight(*each) for each in instants)
        ]
        unexpected = [probe for probe in lost if probe not in in_flight]
        assert unexpected == [], self._story(probes, unexpected[0], instants)
        return len(lost), len(in_flight)

    def _story(
        self, probes: list[pacing.Paced], lost: pacing.Paced, instants: list[Instant]
    ) -> str:
        """What happened while a probe was lost; times are seconds since its start."""
        host = lost.target.split(",")[1]
        report = self._node.operator.report()
        assert report is not None
        (pod,) = (pod for pod in report.pods if host in pod.addresses)
        directory = str(self._node.operator.run_directory)
        shown = self._node.operator.run("drops", "--run-directory", directory, "--output", "json")
        sources = json.loads(shown.stdout)["sources"]
        segments = self._handshakes.of_port(lost.port, lost.started)
        return "\n".join(
            [
                f"lost: {lost}",
                f"faults: {[tuple(at - lost.started for at in each) for each in instants]}",
                *(f"slow, too: {probe}" for probe in slow_beside(probes, lost)),
                *(f"segment: {segment}" for segment in segments),
                *(f"gate: {gate.packets}" for gate in pod.gates),
                *(f"source: {source}" for source in sources if source["pod"] == pod.name),
                *(f"log: {line}" for line in self._node.operator.log_lines()),
            ]
        )


@contextlib.contextmanager
def under_load(node: Node, kubelet: NodeClient, folder: pathlib.Path) -> Iterator[Load]:
    """At its end no process but the kubelet may have reached a pod or the relay."""
    pods = [pod for name, pod in node.pods.items() if name != "witness"]
    targets = [
        target
        for pod in pods
        for target in (*pod.targets("http", fleet.HTTP), *pod.targets("tcp", fleet.TCP))
    ]
    with (
        pacing.paced(node.kubelet, folder, PER_SECOND, targets) as paced,
        loads.attacker() as attacker,
        handshakes.recorded() as recorded,
    ):
        attacker.set_targets([*(pod.pod.ipv4 for pod in pods), *some_of_the_relays_addresses()])
        load = Load(node, kubelet, paced, recorded)
        load.go_on()
        yield load
        attacked = attacker.result()
    assert attacked["reached"] == []
    assert attacked["attempts"] > PER_SECOND


def slow_beside(probes: list[pacing.Paced], lost: pacing.Paced) -> list[pacing.Paced]:
    """Others that took long at the same time: a busy machine delays many, a lost packet one."""
    return [
        probe
        for probe in probes
        if probe.was_in_flight(lost.started, lost.ended)
        and probe.ended - probe.started > SLOW_SECONDS
    ]


def some_of_the_relays_addresses() -> list[str]:
    """The first targets of the first relays, which lie where each share of the range begins."""
    shares = list(ipaddress.IPv4Network(RANGE4).subnets(prefixlen_diff=3))
    return [str(share[FIRST_HOST + number]) for share in shares[:3] for number in range(PODS)]


def is_proxied(
    node: Node, kubelet: NodeClient, peers: Callable[[], dict[str, set[str]]] | None = None
) -> bool:
    """Whether a pod that no other client connects to sees its own address as the peer. peers: as
    that of the fleet."""
    peers = peers or node.fleet.peers
    witness = node.pods["witness"]
    peers()
    targets = witness.targets("http", fleet.HTTP)
    assert kubelet.probe(targets) == dict.fromkeys(targets, nodeclient.OK)
    return peers()[witness.pod.name] == {witness.pod.ipv4, witness.pod.ipv6}


def relay(node: Node) -> int:
    pid = node.relay_pid()
    assert pid is not None, "no relay runs"
    return pid


def kill(pid: int) -> Instant:
    """From before its end until all its connections are closed."""
    descriptor = os.pidfd_open(pid)
    try:
        began = time.monotonic()
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        assert ended.poll(10_000), "a killed relay does not end"
        return began, time.monotonic()
    finally:
        os.close(descriptor)


def stop(pid: int) -> Instant:
    """From before it stops until its last beat is stale."""
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    wait_until("the relay stopped", lambda: state_of(pid) == "T")
    return began, time.monotonic() + STALE_AFTER_SECONDS


def state_of(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def print_lost(capsys: pytest.CaptureFixture[str], what: str, lost: tuple[int, int]) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{what}: {lost[0]} probes lost of {lost[1]} in flight\n")


def test_when_the_relay_is_killed_only_probes_in_flight_fail(
    node: Node, kubelet: NodeClient, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    instants = []
    with under_load(node, kubelet, tmp_path) as load:
        for _ in range(SCALE.kills):
            instants.append(kill(relay(node)))
            load.go_on()
    print_lost(capsys, f"{SCALE.kills} relays killed", load.lost(instants))


def test_when_the_relay_hangs_only_probes_until_its_heartbeat_is_stale_fail(
    node: Node, kubelet: NodeClient, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with under_load(node, kubelet, tmp_path) as load:
        hung = relay(node)
        instant = stop(hung)
        try:
            time.sleep(SCALE.stopped_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):  # its agent may have killed it
                os.kill(hung, signal.SIGCONT)
        load.go_on()
    print_lost(capsys, f"a relay hung for {SCALE.stopped_seconds} s", load.lost([instant]))


def test_when_the_relay_is_upgraded_no_probe_fails(
    node: Node, kubelet: NodeClient, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with under_load(node, kubelet, tmp_path) as load:
        for _ in range(SCALE.upgrades):
            before = relay(node)
            restart_relay(node)
            assert relay(node) != before
            load.go_on()
    lost = load.lost([])
    assert lost == (0, 0)
    print_lost(capsys, f"{SCALE.upgrades} upgrades", lost)


def restart_relay(node: Node) -> None:
    directory = str(node.operator.run_directory)
    done = node.operator.run("relay", "restart", "--run-directory", directory)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_while_no_agent_runs_no_probe_fails_and_no_pod_sees_the_node(
    node: Node, kubelet: NodeClient, tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    """Its relay continues until the next agent's has taken over."""
    with under_load(node, kubelet, tmp_path) as load:
        load.forget_peers()
        before = relay(node)
        node.operator.stop(number)
        load.go_on()
        node.start()
        load.go_on()
        wait_until("the relay gone", lambda: has_ended(before))
    assert load.lost([]) == (0, 0)
    load.check_peers()


def test_while_the_agent_is_upgraded_no_probe_fails_and_no_pod_sees_the_node(
    node: Node, kubelet: NodeClient, tmp_path: pathlib.Path
) -> None:
    """There, and back to the agent that stands by."""
    second = SecondAgent(node.operator, tmp_path / "second")
    with under_load(node, kubelet, tmp_path) as load:
        load.forget_peers()
        try:
            second.start_standby(*node.options)
            node.settle(by=second)
            load.go_on()
        finally:
            second.stop(signal.SIGTERM)
        node.settle()
        load.go_on()
    assert load.lost([]) == (0, 0)
    load.check_peers()


def test_connections_that_a_relay_has_no_descriptors_for_go_direct(
    node: Node, kubelet: NodeClient
) -> None:
    witness = node.pods["witness"]
    own = {witness.pod.ipv4, witness.pod.ipv6}
    target, _ = witness.targets("http", fleet.HTTP)
    try:
        # The agent's limit, and so its next relay's; raising it again may need a privilege.
        resource.prlimit(node.operator.pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS,) * 2)
        restart_relay(node)
        wait_until("the kubelet proxied", lambda: is_proxied(node, kubelet))
        peers: set[str] = set()
        for _ in range(MOST_KEPT):
            assert kubelet.hold(target) == [nodeclient.OK]
            peers |= node.fleet.peers()[witness.pod.name]
            if peers - own:
                break
        assert peers - own
        assert set(kubelet.request_again()) == {nodeclient.OK}
        kubelet.let_go()
        wait_until("the kubelet proxied again", lambda: is_proxied(node, kubelet))
    finally:
        node.operator.stop(signal.SIGTERM)
        node.start()
