"""Another pod, or a router, that sends the host's packets back: they arrive as forwarded ones."""

import socket
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, links, syns, traffic, wire
from tests.kernel.counting import Counting
from tests.kernel.guarded import PodState

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
STRAY_DROPPED = (Verdict.DROP, Reason.STRAY)


class Bouncing:
    """An enforced pod and one that forwards, to which a packet socket of the node sends."""

    def __init__(self, watched: PodState, router: labs.LabPod, gates: Gates) -> None:
        self.watched = watched
        self._router = router
        self._gates = gates

    def set_router_mode(self, mode: Mode) -> Counting:
        config = GateConfig(mode, self._router.addresses)
        self._gates.install(self._router.ifindex, config)
        return Counting(self._gates, self._router.ifindex)

    def send(self, version: int, flags: int) -> None:
        self._send(frames.segment(self._ends(version, guarded.TCP_PORT), flags, data=b"bounced"))

    def send_datagram(self, version: int, data: bytes, port: int = guarded.UDP_PORT) -> None:
        ends = self._ends(version, port)
        self._send(frames.packet(ends, frames.UDP, frames.udp(ends, data)))

    def end(self, end: bytes) -> None:
        """The end marker, by the same path; a rule of the pod admits it."""
        self.send_datagram(4, end, guarded.END_PORT)

    def _send(self, frame: bytes) -> None:
        with links.packet_socket(self._router.interface) as sock:
            wire.send(sock, frame)

    def _ends(self, version: int, port: int) -> frames.Ends:
        with self._router.open_socket(socket.AF_PACKET, socket.SOCK_RAW) as inside:
            inside.bind(("eth0", 0))
            mac = inside.getsockname()[4]
        source = frames.address(syns.STRANGER[version])
        pod = frames.address(traffic.address(self.watched.pod, version))
        return frames.Ends(source, pod, mac, port=port)


@pytest.fixture
def bouncing(lab: labs.Lab, gates: Gates) -> Iterator[Bouncing]:
    router = lab.add_pod("router", 3)
    links.let_forward(router)
    with guarded.guarded(gates, lab.add_pod("web", 1), lab.add_pod("neighbour", 2)) as watched:
        watched.set_mode(Mode.ENFORCE)
        yield Bouncing(watched, router, gates)


@VERSIONS
def test_packet_bounced_off_a_pod_in_audit_is_dropped_by_the_other_pods_gate(
    bouncing: Bouncing, version: int
) -> None:
    bouncing.set_router_mode(Mode.OFF)
    bouncing.send(version, frames.SYN)
    assert bouncing.watched.arrived(bouncing.end)  # the path works

    counting = bouncing.set_router_mode(Mode.AUDIT)
    bouncing.send(version, frames.SYN)
    bouncing.send(version, frames.ACK | frames.PSH)
    bouncing.send_datagram(version, b"bounced")
    assert bouncing.watched.arrived(bouncing.end) == []
    moved = counting.moved()
    assert moved[STRAY_DROPPED] == 2
    assert bouncing.watched.moved() == {}


@VERSIONS
def test_a_pod_under_enforce_does_not_bounce(bouncing: Bouncing, version: int) -> None:
    counting = bouncing.set_router_mode(Mode.ENFORCE)
    bouncing.send(version, frames.SYN)
    bouncing.send_datagram(version, b"bounced")
    assert bouncing.watched.arrived() == []
    moved = counting.moved()
    assert moved[STRAY_DROPPED] == 2
    assert not moved.keys() - {STRAY_DROPPED, *guarded.CONTROL}
