"""A bridge without an entry for a pod's MAC floods copies to all ports; copies have no socket.
tests/attacks has what is dropped there (topology flooding).

The copy on the last port is the original, so each test takes every pod as its target in turn.
"""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from bpf import abi, loader, map_specs, pins
from bpf.gates import Attachment, GateConfig, Gates
from bpf.host_devices import HostDevicePrograms
from bpf.node_config import NodeConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import cgroups, frames, guarded, links, traffic, wire
from tests.kernel.counting import Counting
from tests.kernel.reply_tables import start_reply_table
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
TARGETS = pytest.mark.parametrize("target", [0, 1, 2], ids=["first", "middle", "last"])
KINDS = pytest.mark.parametrize("kind", ["data", "syn", "udp"])
PORT = 8080
BY_RELAY = pytest.mark.enforce_only("in strict a relay connects for it: test_strict_gate.py")
SENDERS = pytest.mark.parametrize(
    "sender",
    [
        SourceKind.CGROUP,
        SourceKind.ANCESTOR,
        pytest.param(SourceKind.KUBELET, marks=BY_RELAY),
    ],
)
REFUSED = {(Verdict.DROP, Reason.NODE), (Verdict.DROP, Reason.KERNEL)}
STRAY = (Verdict.DROP, Reason.STRAY)

# Talks to a server and is answered by it, over TCP or UDP; a lost SYN would be sent again too late.
TALK = """
import socket, sys
kind, address, port = sys.argv[1:]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
sock = socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
sock.settimeout(5)
sock.connect((address, int(port)))
sock.send(b"question")
assert sock.recv(100) == b"answer"
"""


class Flooding:
    """Three pods on a bridge that has forgotten their ports, each behind an enforcing gate."""

    def __init__(self, pods: list[labs.LabPod], gates: Gates, guards: HostDevicePrograms) -> None:
        self.pods = pods
        self._gates = gates
        guards.ensure_bridges({links.index_of(labs.BRIDGE)})
        for pod in pods:
            with pod.listen(PORT):
                for version in (4, 6):  # neighbours are resolved, the ports are up
                    assert traffic.node_reaches(pod, version, PORT)
        traffic.forget_ports(labs.BRIDGE, pods)

    def enforce(self, *rules: Rule) -> list[Counting]:
        for pod in self.pods:
            self._gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, rules))
            start_reply_table(self._gates, pod.ifindex)
        return [Counting(self._gates, pod.ifindex) for pod in self.pods]


@pytest.fixture
def flooding(
    lab: labs.Lab, gates: Gates, loaded: loader.Loaded, installation: pins.Pins
) -> Iterator[Flooding]:
    pods = [lab.add_pod(name, number, bridged=True) for number, name in enumerate("abc", 1)]
    with contextlib.closing(HostDevicePrograms(loaded, installation, Attachment.CLSACT)) as guards:
        try:
            yield Flooding(pods, gates, guards)
        finally:
            guards.ensure_bridges(set())
            loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@TARGETS
@VERSIONS
@pytest.mark.parametrize("kind", ["tcp", "udp"])
@SENDERS
def test_admitted_source_talks_over_a_flooding_bridge(
    flooding: Flooding,
    loaded: loader.Loaded,
    target: int,
    version: int,
    kind: str,
    sender: SourceKind,
) -> None:
    pod = flooding.pods[target]
    reason = Reason.PROBE if sender is SourceKind.KUBELET else Reason.RULE
    with cgroups.cgroup() as group, server(pod, version, kind) as sock:
        rule = Rule(sender, 0, PORT, PORT, cgroup=group.id, level=group.level)
        if sender is SourceKind.KUBELET:
            NodeConfig(loaded).set_kubelet(group.id)
            rule = Rule(sender, 0, PORT, PORT)
        countings = flooding.enforce(rule)
        process = group.popen(
            [*BARE_PYTHON, "-c", TALK, kind, traffic.address(pod, version), str(PORT)]
        )
        answer(sock, kind)
        assert process.wait(10) == 0
    moved = [counting.moved() for counting in countings]
    assert moved[target][Verdict.PASS, reason] == 1  # of the first SYN or datagram
    assert not REFUSED & moved[target].keys()
    for other in moved[:target] + moved[target + 1 :]:
        assert other[STRAY] > 0
        assert not REFUSED & other.keys()


@contextlib.contextmanager
def server(pod: labs.LabPod, version: int, kind: str) -> Iterator[socket.socket]:
    type_ = socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM
    with pod.open_socket(traffic.family(version), type_) as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.bind(("", PORT))
        if kind == "tcp":
            sock.listen()
        yield sock


def answer(sock: socket.socket, kind: str) -> None:
    if kind == "udp":
        question, whence = sock.recvfrom(100)
        sock.sendto(b"answer", whence)
    else:
        peer, _ = sock.accept()
        with peer:
            peer.settimeout(traffic.LIMIT_SECONDS)
            question = peer.recv(100)
            peer.sendall(b"answer")
    assert question == b"question"


def injected(pod: labs.LabPod, version: int, kind: str) -> bytes:
    """A frame of the host to the pod's address: into a connection, or one that opens a flow."""
    ends = frames.Ends(
        frames.address(traffic.NODE[version]),
        frames.address(traffic.address(pod, version)),
        port=PORT,
    )
    match kind:
        case "data":
            return frames.segment(ends, frames.ACK | frames.PSH, data=b"injected")
        case "syn":
            return frames.segment(ends, frames.SYN)
    return frames.packet(ends, frames.UDP, frames.udp(ends, b"injected"))


def inject_to_two_gates(
    flooding: Flooding, gates: Gates, version: int, kind: str, *, pod: str
) -> tuple[guarded.Moved, ...]:
    """What each gate counts of a frame to an address that the first two interfaces have.

    pod: whose interfaces they are; "": of two pods.
    """
    first, target, _ = flooding.pods
    flooding.enforce()
    for interface in (first, target):
        config = GateConfig(Mode.ENFORCE, target.addresses, pod=pod)
        gates.install(interface.ifindex, config)
    countings = [Counting(gates, each.ifindex) for each in flooding.pods]
    with links.packet_socket(labs.BRIDGE) as sock:
        wire.send(sock, injected(target, version, kind))
    return tuple(counting.moved_but_control() for counting in countings)


@KINDS
@VERSIONS
def test_packet_for_a_pod_with_two_interfaces_is_dropped_before_there_are_copies(
    flooding: Flooding, gates: Gates, version: int, kind: str
) -> None:
    moved = inject_to_two_gates(flooding, gates, version, kind, pod="uid")
    assert [sum(each.values()) for each in moved] == [1, 0, 0]
    assert moved[0].keys() <= REFUSED


@KINDS
@VERSIONS
def test_copies_for_an_address_of_two_pods_are_dropped_by_the_gates_of_both(
    flooding: Flooding, gates: Gates, version: int, kind: str
) -> None:
    """The bridge finds no gate for an address that two pods have."""
    moved = inject_to_two_gates(flooding, gates, version, kind, pod="")
    assert [sum(each.values()) for each in moved] == [1, 1, 1]
    assert moved[0].keys() | moved[1].keys() <= REFUSED
    assert moved[2] == {STRAY: 1}
