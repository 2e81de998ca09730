"""The verdict of `podgate explain` on a flow is that of the kernel."""

import collections
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from agent.operate.explain import evaluation, facts, model, reading, replies
from agent.operate.explain.evaluation import Evaluation
from agent.operate.explain.facts import Flow, Source
from agent.operate.pinned import installation as pinned_installation
from bpf import abi, loader, map_specs, pins
from bpf.gates import GateConfig, Gates
from bpf.node_config import NodeConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import cgroups, explained, frames, guarded, syns, traffic
from tests.kernel.counting import Counting
from tests.kernel.guarded import PodState
from tests.kernel.reply_tables import start_reply_table
from tests.kernel.syns import FirstPacket, Target

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
PORT, OTHER_PORT = 8080, 8081
# Twice as much must have passed since boot, or a heartbeat has a negative time.
STALE_SECONDS, DEAD_MAN_SECONDS = 15, 60
UNIT = 7


class Explaining:
    """Evaluates flows by the facts that are pinned, as they were when the address was last read."""

    def __init__(self, installation: pins.Pins) -> None:
        self._installation = installation
        self._facts: dict[str, facts.Facts] = {}

    def read(self, *addresses: str) -> None:
        with pinned_installation.opened(self._installation) as loaded:
            for address in addresses:
                target = frames.address(address)
                self._facts[address] = reading.read(self._installation, loaded, target)

    def flow(
        self, source: Source, address: str, protocol: int, port: int, reply: bool | None = None
    ) -> Evaluation:
        flow = Flow(frames.address(address), protocol, port, reply)
        return evaluation.evaluate(self._facts[address], source, flow, time.monotonic_ns())


@pytest.fixture
def explaining(loaded: loader.Loaded, installation: pins.Pins) -> Explaining:
    return Explaining(installation)


@pytest.fixture
def config(loaded: loader.Loaded) -> Iterator[NodeConfig]:
    """The node's config, as it was afterwards."""
    made = NodeConfig(loaded)
    yield made
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))
    loaded.map(map_specs.KUBELET_REMADE).set(bytes(4), bytes(abi.CKubeletRemade()))


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def watched(request: pytest.FixtureRequest, lab: labs.Lab, gates: Gates) -> Iterator[PodState]:
    pod = lab.add_pod("web", 1, bridged=request.param)
    neighbour = lab.add_pod("neighbour", 2, bridged=request.param)
    with guarded.guarded(gates, pod, neighbour) as made:
        yield made


PROTOCOLS = {
    "sctp": syns.IPPROTO_SCTP,
    "gre": syns.IPPROTO_GRE,
    "ping": socket.IPPROTO_ICMP,
    "ping-datagram": socket.IPPROTO_ICMP,
}
PORTS = {TCP: guarded.TCP_PORT, UDP: guarded.UDP_PORT, syns.IPPROTO_SCTP: guarded.TCP_PORT}


def protocol_of(first_packet: FirstPacket, version: int) -> int:
    protocol = PROTOCOLS.get(first_packet.name, UDP if "udp" in first_packet.name else TCP)
    return socket.IPPROTO_ICMPV6 if version == 6 and protocol == socket.IPPROTO_ICMP else protocol


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.AUDIT, Mode.ENFORCE, Mode.STRICT])
@VERSIONS
def test_answer_is_the_verdict_on_every_first_packet_of_a_process(
    watched: PodState, explaining: Explaining, version: int, mode: Mode
) -> None:
    """The bypass suite's: every socket by which a process opens a flow."""
    pod = watched.pod
    address = traffic.address(pod, version)
    interface = labs.BRIDGE if pod.is_bridged else pod.interface
    target = Target(address, interface, guarded.TCP_PORT, guarded.UDP_PORT)
    watched.set_mode(mode)
    explaining.read(address)
    tried = 0
    for first_packet in syns.FIRST_PACKETS:
        if version not in first_packet.versions:
            continue
        try:
            first_packet.begin(target)
        except OSError:  # not of this kernel: the bypass suite skips it
            continue
        has_arrived = bool(watched.arrived())
        moved = watched.moved().keys()
        protocol = protocol_of(first_packet, version)
        found = explaining.flow(explained.own_source(), address, protocol, PORTS.get(protocol, 0))
        assert (first_packet.name, has_arrived) == (
            first_packet.name,
            found.verdict is not Verdict.DROP,
        )
        if mode is Mode.OFF:
            assert found.reason is None
            assert not moved, first_packet.name
        else:
            assert (found.verdict, found.reason) in moved, first_packet.name
        tried += 1
    assert tried > 20


# Reads lists of [address, protocol, port], sends a SYN or a datagram to each and prints the errors.
SEND = """
import json, socket, sys
for line in sys.stdin:
    errors = []
    for address, kind, port in json.loads(line):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        type = socket.SOCK_STREAM if kind == 6 else socket.SOCK_DGRAM
        with socket.socket(family, type | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.connect((address, port))
                if kind == 17:
                    sock.send(b"datagram")
                errors.append(0)
            except OSError as error:
                errors.append(0 if isinstance(error, BlockingIOError) else error.errno)
    print(json.dumps(errors), flush=True)
"""

Target3 = tuple[str, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class SourceProcess:
    """A process in a cgroup, which sends on request."""

    source: Source
    process: "subprocess.Popen[bytes]"

    def send(self, targets: list[Target3]) -> list[int]:
        """The error of each, 0 for none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(targets).encode() + b"\n")
        self.process.stdin.flush()
        errors: list[int] = json.loads(self.process.stdout.readline())
        return errors


@contextlib.contextmanager
def process_in(group: cgroups.Cgroup) -> Iterator[SourceProcess]:
    process = group.popen(
        [sys.executable, "-c", SEND], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        yield SourceProcess(explained.source_in(group.path), process)


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """Cgroups by their part, and a process in each."""

    groups: dict[str, cgroups.Cgroup]
    processes: dict[str, SourceProcess]

    def rules(self) -> tuple[Rule, ...]:
        """More than the four that fit into a gate's slot."""
        groups = self.groups
        others = [Rule(SourceKind.CGROUP, TCP, 1, 2, cgroup=number) for number in (7, 8, 9)]
        return (
            Rule(SourceKind.KUBELET, TCP, PORT, PORT),
            *others,
            Rule(SourceKind.CGROUP, TCP, PORT, PORT, cgroup=groups["named"].id, id=1),
            Rule(
                SourceKind.ANCESTOR,
                UDP,
                PORT,
                OTHER_PORT,
                cgroup=groups["subtree"].id,
                level=groups["subtree"].level,
                id=2,
            ),
            Rule(SourceKind.ANY, UDP, guarded.END_PORT, guarded.END_PORT),
        )


@pytest.fixture
def node(isolated: None) -> Iterator[Node]:
    with contextlib.ExitStack() as stack:
        groups: dict[str, cgroups.Cgroup] = {}
        for name in ("kubelet", "remade", "named", "subtree", "pods", "stranger"):
            groups[name] = stack.enter_context(cgroups.cgroup())
        for name, parent in (
            ("below-kubelet", "kubelet"),
            ("below-named", "named"),
            ("below-subtree", "subtree"),
            ("container", "pods"),
        ):
            groups[name] = stack.enter_context(cgroups.cgroup("below", below=groups[parent]))
        processes = {name: stack.enter_context(process_in(group)) for name, group in groups.items()}
        yield Node(groups, processes)


State = Callable[[loader.Loaded, NodeConfig, Node], None]


def beat(loaded: loader.Loaded, age_seconds: float) -> None:
    NodeConfig(loaded, now_ns=lambda: time.monotonic_ns() - int(age_seconds * 1e9)).beat()


def alive(loaded: loader.Loaded, config: NodeConfig, node: Node) -> None:
    beat(loaded, 0)


def never_started(loaded: loader.Loaded, config: NodeConfig, node: Node) -> None:
    config.set_kubelet(None)


def unidentified(loaded: loader.Loaded, config: NodeConfig, node: Node) -> None:
    config.set_kubelet(None)
    beat(loaded, 0)


def unidentified_and_no_pods(loaded: loader.Loaded, config: NodeConfig, node: Node) -> None:
    config.set_kubelet(None)
    config.set_pods(None)
    beat(loaded, 0)


def stale(loaded: loader.Loaded, config: NodeConfig, node: Node) -> None:
    beat(loaded, 2 * STALE_SECONDS)


def stale_and_followed(loaded: loader.Loaded, config: NodeConfig, node: Node) -> None:
    """The kernel has recorded another cgroup at the unit's path."""
    config.set_kubelet_unit(UNIT)
    remade = abi.CKubeletRemade(node.groups["remade"].id, UNIT)
    loaded.map(map_specs.KUBELET_REMADE).set(bytes(4), bytes(remade))
    beat(loaded, 2 * STALE_SECONDS)


def dead_man_passed(loaded: loader.Loaded, config: NodeConfig, node: Node) -> None:
    beat(loaded, 2 * DEAD_MAN_SECONDS)


STATES: tuple[State, ...] = (
    *(alive, never_started, unidentified, unidentified_and_no_pods),
    *(stale, stale_and_followed, dead_man_passed),
)
CONFIGS = (
    {"mode": Mode.AUDIT},
    {"mode": Mode.ENFORCE},
    {"mode": Mode.STRICT},
    {"mode": Mode.STRICT, "without_fallback": True},
)


def agrees(
    pod: labs.LabPod, gates: Gates, node: Node, explaining: Explaining, where: tuple[object, ...]
) -> None:
    """Of every source to every target: its verdict and reason, and for a hook its EPERM."""
    targets: list[Target3] = [
        (traffic.address(pod, version), protocol, port)
        for version in (4, 6)
        for protocol, port in ((TCP, PORT), (TCP, OTHER_PORT), (UDP, PORT), (UDP, OTHER_PORT))
    ]
    explaining.read(pod.ipv4, pod.ipv6)
    for name, process in node.processes.items():
        counting = Counting(gates, pod.ifindex)
        errors = process.send(targets)
        answers = [explaining.flow(process.source, *target) for target in targets]
        moved = counting.moved_but_control()
        moved.pop((Verdict.PASS, Reason.ESTABLISHED), None)  # the kernel's RST for a closed socket
        expected = collections.Counter((found.verdict, found.reason) for found in answers)
        assert (*where, name, moved) == (*where, name, dict(expected))
        rejected = [found.decided_by == model.CONNECT_HOOK for found in answers]
        assert (*where, name, [error != 0 for error in errors]) == (*where, name, rejected)


@pytest.mark.parametrize("has_hooks", [False, True], ids=["gate", "hooks"])
def test_answer_is_the_verdict_for_every_source_mode_and_state_of_the_agent(
    request: pytest.FixtureRequest,
    lab: labs.Lab,
    gates: Gates,
    loaded: loader.Loaded,
    config: NodeConfig,
    node: Node,
    explaining: Explaining,
    has_hooks: bool,
) -> None:
    pod = lab.add_pod("web", 1)
    if has_hooks:
        request.getfixturevalue("attached_hooks")
    netns = config.read().node_netns
    with pod.listen(PORT), pod.listen(OTHER_PORT):
        assert traffic.node_reaches(pod, 4, PORT)
        assert traffic.node_reaches(pod, 6, PORT)
        for options in CONFIGS:
            made = GateConfig(addresses=pod.addresses, rules=node.rules(), **options)
            gates.install(pod.ifindex, made)
            for state in STATES:
                loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig(node_netns=netns)))
                config.set_limits(
                    stale_after_seconds=STALE_SECONDS, dead_man_seconds=DEAD_MAN_SECONDS
                )
                config.set_kubelet(node.groups["kubelet"].id)
                config.set_pods(node.groups["pods"].id, node.groups["pods"].level)
                state(loaded, config, node)
                agrees(pod, gates, node, explaining, (made.mode.label, options, state.__name__))


@VERSIONS
def test_reply_passes_and_the_answer_names_the_flow_of_the_pod(
    lab: labs.Lab, gates: Gates, loaded: loader.Loaded, explaining: Explaining, version: int
) -> None:
    """To a server of the host, over UDP and TCP; from another port nothing is a reply."""
    pod = lab.add_pod("web", 1)
    node_address = traffic.NODE[version]
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
    start_reply_table(gates, pod.ifindex)
    family = traffic.family(version)
    with (
        socket.socket(family, socket.SOCK_DGRAM) as server,
        pod.open_socket(family, socket.SOCK_DGRAM) as client,
    ):
        server.bind((node_address, 0))
        server.settimeout(traffic.LIMIT_SECONDS)
        client.connect((node_address, server.getsockname()[1]))
        client.send(b"question")
        _, whence = server.recvfrom(100)
        at = frames.address(traffic.address(pod, version)), whence[1]
        peers = [frames.address(node_address)]
        now_ns = time.monotonic_ns()
        explaining.read(whence[0])
        for port, is_reply in ((server.getsockname()[1], True), (9999, False)):
            recorded = replies.is_recorded(loaded, pod.ifindex, UDP, at, peers, port, now_ns)
            assert recorded is is_reply
            found = explaining.flow(explained.own_source(), whence[0], UDP, whence[1], recorded)
            verdict = Verdict.PASS if is_reply else Verdict.DROP
            assert (found.verdict, found.reason is Reason.REPLY) == (verdict, is_reply)
            assert ("the pod opened this flow" in found.text) is is_reply
        server.sendto(b"answer", whence)
        client.settimeout(traffic.LIMIT_SECONDS)
        assert client.recv(100) == b"answer"
        assert gates.counts()[pod.ifindex][Verdict.PASS, Reason.REPLY] == 1


@VERSIONS
def test_segment_of_a_connection_of_the_pod_passes(
    lab: labs.Lab, gates: Gates, explaining: Explaining, version: int
) -> None:
    pod = lab.add_pod("web", 1)
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
    with (
        traffic.listen_on_node(0) as server,
        pod.open_socket(traffic.family(version), socket.SOCK_STREAM) as client,
    ):
        port = server.getsockname()[1]
        client.settimeout(traffic.LIMIT_SECONDS)
        client.connect((traffic.NODE[version], port))
        peer, whence = server.accept()
        at = frames.address(traffic.address(pod, version)), whence[1]
        explaining.read(str(at[0]))
        with peer:
            assert replies.is_connected(at, port)
            assert not replies.is_connected(at, port + 1)
            found = explaining.flow(explained.own_source(), str(at[0]), TCP, at[1], True)
            assert (found.verdict, found.reason) == (Verdict.PASS, Reason.ESTABLISHED)
            peer.sendall(b"answer")
            assert client.recv(100) == b"answer"
