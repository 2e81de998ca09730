"""Another pod, or a router, that sends the host's packets back: they arrive as forwarded ones."""

import contextlib
import itertools
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from bpf import loader, pins, syscalls
from bpf.gates import Attachment, GateConfig, Gates
from bpf.host_devices import HostDevicePrograms
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import foreign, frames, guarded, links, syns, traffic, tunnelled, wire
from tests.kernel.conftest import MakeGates
from tests.kernel.counting import Counting
from tests.kernel.guarded import PodState
from tests.kernel.reply_tables import start_reply_table

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
STRAY_DROPPED = (Verdict.DROP, Reason.STRAY)
NODE_DROPPED = (Verdict.DROP, Reason.NODE)
FAMILY = {4: "ip", 6: "ip6"}
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}
NODE_PORT = 30080

# The node's connection tracking still has the flows of previous tests, which it translates to their
# pods.
_source_ports = itertools.count(21000)

ByAddress = Callable[["Bouncing", int], contextlib.AbstractContextManager[None]]


class Bouncing:
    """An enforced pod and one that forwards, to which a packet socket of the node sends."""

    def __init__(
        self, watched: PodState, router: labs.LabPod, gates: Gates, devices: HostDevicePrograms
    ) -> None:
        self.watched = watched
        self.destination: str | None = None
        """Instead of the pod's own address."""
        self.port: int | None = None
        self.is_encapsulated = False
        self._router = router
        self._gates = gates
        self._devices = devices
        self._source_port = next(_source_ports)

    def set_router_mode(self, mode: Mode) -> Counting:
        config = GateConfig(mode, self._router.addresses)
        self._gates.install(self._router.ifindex, config)
        start_reply_table(self._gates, self._router.ifindex)
        return Counting(self._gates, self._router.ifindex)

    def stamp_without_a_gate(self) -> None:
        """As for a pod in mode off, which has no gate."""
        self._devices.ensure_hand_made({self._router.ifindex})

    def send(self, version: int, flags: int) -> None:
        ends = self._ends(version, self.port or guarded.TCP_PORT)
        self._send(version, frames.segment(ends, flags, data=b"bounced"))

    def send_datagram(self, version: int, data: bytes, port: int = guarded.UDP_PORT) -> None:
        ends = self._ends(version, port)
        self._send(version, frames.packet(ends, frames.UDP, frames.udp(ends, data)))

    def end(self, end: bytes) -> None:
        """The end marker, by the same path; a rule of the pod admits it."""
        plain = Bouncing(self.watched, self._router, self._gates, self._devices)
        plain.is_encapsulated = self.is_encapsulated
        plain.send_datagram(4, end, guarded.END_PORT)

    def _send(self, version: int, frame: bytes) -> None:
        if self.is_encapsulated:
            source = frames.address(syns.STRANGER[version])
            node = frames.address(traffic.NODE[version])
            ends = frames.Ends(source, node, self._mac(), 31000, tunnelled.VXLAN_PORT)
            frame = frames.packet(ends, frames.UDP, tunnelled.udp(ends, frame))
        with links.packet_socket(self._router.interface) as sock:
            wire.send(sock, frame)

    def _ends(self, version: int, port: int) -> frames.Ends:
        source = frames.address(syns.STRANGER[version])
        to = frames.address(self.destination or traffic.address(self.watched.pod, version))
        mac = tunnelled.MAC if self.is_encapsulated else self._mac()
        return frames.Ends(source, to, mac, self._source_port, port)

    def _mac(self) -> bytes:
        with self._router.open_socket(socket.AF_PACKET, socket.SOCK_RAW) as inside:
            inside.bind(("eth0", 0))
            mac: bytes = inside.getsockname()[4]
            return mac


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def bouncing(
    request: pytest.FixtureRequest,
    lab: labs.Lab,
    gates: Gates,
    loaded: loader.Loaded,
    installation: pins.Pins,
) -> Iterator[Bouncing]:
    """Over a bridge the router reaches the pod itself, otherwise by way of the node."""
    router, pod, neighbour = (
        lab.add_pod(name, number, bridged=request.param)
        for name, number in (("router", 3), ("web", 1), ("neighbour", 2))
    )
    links.let_forward(router)
    with (
        guarded.guarded(gates, pod, neighbour) as watched,
        contextlib.closing(HostDevicePrograms(loaded, installation, Attachment.CLSACT)) as devices,
    ):
        reach(router, pod)
        watched.set_mode(Mode.ENFORCE)
        yield Bouncing(watched, router, gates, devices)
        devices.ensure_hand_made(set())


def reach(router: labs.LabPod, pod: labs.LabPod) -> None:
    """So that neighbours are resolved and ports of a bridge are up; ends by RST."""
    for version in (4, 6):
        with router.open_socket(traffic.family(version), socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.settimeout(traffic.LIMIT_SECONDS)
            sock.connect((traffic.address(pod, version), guarded.TCP_PORT))


@contextlib.contextmanager
def by_its_own_address(bouncing: Bouncing, version: int) -> Iterator[None]:
    yield


@contextlib.contextmanager
def by_a_service(bouncing: Bouncing, version: int) -> Iterator[None]:
    pod = traffic.address(bouncing.watched.pod, version)
    with _translated(version, f"daddr {SERVICE[version]} dnat to {pod}"):
        bouncing.destination = SERVICE[version]
        yield


@contextlib.contextmanager
def by_a_node_port(bouncing: Bouncing, version: int) -> Iterator[None]:
    pod = traffic.address(bouncing.watched.pod, version)
    to = f"{pod}:{guarded.TCP_PORT}" if version == 4 else f"[{pod}]:{guarded.TCP_PORT}"
    matched = f"daddr {traffic.NODE[version]} tcp dport {NODE_PORT} dnat to {to}"
    with _translated(version, matched):
        bouncing.destination, bouncing.port = traffic.NODE[version], NODE_PORT
        yield


@contextlib.contextmanager
def by_a_tunnel(bouncing: Bouncing, version: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for local in traffic.NODE.values():
            port, network = tunnelled.VXLAN_PORT, tunnelled.NETWORK
            stack.enter_context(links.vxlan(tunnelled.MAC, port, network, local))
        bouncing.is_encapsulated = True
        yield


def _translated(version: int, rule: str) -> contextlib.AbstractContextManager[None]:
    family = FAMILY[version]
    return links.table(
        family, f"chain in {{ type nat hook prerouting priority -100;\n{family} {rule}\n}}"
    )


def in_audit(bouncing: Bouncing) -> None:
    bouncing.set_router_mode(Mode.AUDIT)


def in_off(bouncing: Bouncing) -> None:
    """A gate that has not been removed yet."""
    bouncing.set_router_mode(Mode.OFF)


def without_a_gate(bouncing: Bouncing) -> None:
    bouncing.stamp_without_a_gate()


# tests/attacks has the other ways by a pod without a gate (way "router").
@pytest.mark.parametrize(
    ("router", "way"),
    [
        *itertools.product(
            (in_audit, in_off), (by_its_own_address, by_a_service, by_a_node_port, by_a_tunnel)
        ),
        (without_a_gate, by_a_tunnel),
    ],
    ids=lambda value: value.__name__,
)
@VERSIONS
def test_packet_bounced_off_a_pod_that_forwards_is_dropped(
    bouncing: Bouncing, way: ByAddress, version: int, router: Callable[[Bouncing], None]
) -> None:
    with way(bouncing, version):
        bouncing.send(version, frames.SYN)
        assert bouncing.watched.arrived(bouncing.end)  # the path works

        router(bouncing)
        bouncing.watched.moved()
        bouncing.send(version, frames.SYN)
        assert bouncing.watched.arrived(bouncing.end) == []
        if way is not by_its_own_address or router is not in_audit:
            assert bouncing.watched.moved() == {NODE_DROPPED: 1}
        if way is by_its_own_address:
            bouncing.send_datagram(version, b"bounced")
            assert bouncing.watched.arrived(bouncing.end) == []


@VERSIONS
def test_stamp_survives_programs_that_accept_packets(
    bouncing: Bouncing, lab: labs.Lab, make_gates: MakeGates, version: int
) -> None:
    """A CNI's, attached by tcx behind the gate, and at the pod's ingress behind ours."""
    router = lab.pods["router"]
    gates = make_gates(Attachment.TCX)
    with contextlib.ExitStack() as stack:
        stack.enter_context(by_a_service(bouncing, version))
        for where in (syscalls.BPF_TCX_EGRESS, syscalls.BPF_TCX_INGRESS):
            accepting = foreign.attached_by_tcx(router.ifindex, foreign.TC_ACT_OK, where=where)
            stack.enter_context(accepting)
        bouncing.send(version, frames.SYN)
        assert bouncing.watched.arrived(bouncing.end)  # the path works
        gates.install(router.ifindex, GateConfig(Mode.AUDIT, router.addresses))
        start_reply_table(gates, router.ifindex)
        bouncing.send(version, frames.SYN)
        assert bouncing.watched.arrived(bouncing.end) == []


@VERSIONS
def test_packet_bounced_off_a_pod_in_audit_is_dropped_by_the_other_pods_gate(
    bouncing: Bouncing, version: int
) -> None:
    bouncing.send(version, frames.SYN)
    assert bouncing.watched.arrived(bouncing.end)  # the path works

    counting = bouncing.set_router_mode(Mode.AUDIT)
    bouncing.send(version, frames.SYN)
    bouncing.send(version, frames.ACK | frames.PSH)
    bouncing.send_datagram(version, b"bounced")
    assert bouncing.watched.arrived(bouncing.end) == []
    moved = counting.moved()
    assert moved[STRAY_DROPPED] == 3
    assert bouncing.watched.moved() == {}


@VERSIONS
def test_a_pod_under_enforce_does_not_bounce(bouncing: Bouncing, version: int) -> None:
    counting = bouncing.set_router_mode(Mode.ENFORCE)
    bouncing.send(version, frames.SYN)
    bouncing.send_datagram(version, b"bounced")
    assert bouncing.watched.arrived() == []
    assert counting.moved_but_control() == {STRAY_DROPPED: 2}


@pytest.mark.parametrize("mode", [Mode.AUDIT, Mode.ENFORCE, Mode.STRICT], ids=str)
@VERSIONS
def test_what_a_pod_forwards_for_others_still_passes(
    bouncing: Bouncing, lab: labs.Lab, version: int, mode: Mode
) -> None:
    """From another pod, by the same router: no stamp."""
    bouncing.set_router_mode(mode)
    bouncing.stamp_without_a_gate()
    pod = bouncing.watched.pod
    sender = lab.add_pod("sender", 4, bridged=pod.is_bridged)
    address = traffic.address(pod, version)
    with (
        routed_by(lab.pods["router"], sender, address),
        sender.open_socket(traffic.family(version), socket.SOCK_STREAM) as sock,
    ):
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect((address, guarded.TCP_PORT))


@contextlib.contextmanager
def routed_by(router: labs.LabPod, sender: labs.LabPod, address: str) -> Iterator[None]:
    """What the sender sends to the address goes to the router first."""
    gateway = traffic.address(router, 6 if ":" in address else 4)
    if sender.is_bridged:
        links.ip_inside(sender, f"route add {address} via {gateway}")
        yield
    else:
        with links.policy_route(sender.interface, address, gateway, router.interface):
            yield
