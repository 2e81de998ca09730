"""What a process writes header by header does not count as the kernel's, nor as part of a flow:
an attacker with raw and packet sockets ends a pod's connections, takes its traffic elsewhere, and
sends packets in the name of the pod's peers.

Each attempt is repeated with the gate off and must reach the pod.
"""

import contextlib
import dataclasses
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import structlog.testing

from agent.gates.worker import record_raw_sockets
from agent.lab import lab as labs
from agent.logs import Event
from bpf import abi, loader, pins
from bpf.gates import Attachment, Gates
from bpf.host_devices import HostDevicePrograms
from bpf.raw_sockets import OldRawSockets
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, links, offers, syns, traffic, wire
from tests.kernel.guarded import PodState
from tests.kernel.syns import Target

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("attached_hooks")]

GRE, IPIP, OSPF = 47, 4, 89
ROUTER_SOLICITATION, ROUTER_ADVERTISEMENT, SOLICITATION, ADVERTISEMENT = 133, 134, 135, 136
PACKET_VNET_HDR = 15
SOL_PACKET = 263
LOOPBACK_IFINDEX = 1
SO_COOKIE = 57


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def watched(request: pytest.FixtureRequest, lab: labs.Lab, gates: Gates) -> Iterator[PodState]:
    pod = lab.add_pod("web", 1, bridged=request.param)
    neighbour = lab.add_pod("neighbour", 2, bridged=request.param)
    with guarded.guarded(gates, pod, neighbour) as made:
        yield made


Build = Callable[[frames.Ends], tuple[int, bytes]]


@dataclasses.dataclass(frozen=True, slots=True)
class Forgery:
    """A packet in the name of a peer of the pod: its protocol and the bytes behind IP's header."""

    name: str
    build: Build
    versions: tuple[int, ...] = (4, 6)
    requests_first: int = 0
    """The protocol of a packet without ports that the pod sends to the peer before."""

    def __str__(self) -> str:
        return self.name


def control(type_: int, code: int = 0) -> Build:
    def build(ends: frames.Ends) -> tuple[int, bytes]:
        protocol = frames.ICMP if ends.family == 4 else frames.ICMPV6
        return protocol, frames.icmp(ends, type_, code)

    return build


FORGERIES = (
    Forgery("rst", lambda ends: (frames.TCP, frames.tcp(ends, frames.RST, sequence=7))),
    Forgery("bare-ack", lambda ends: (frames.TCP, frames.tcp(ends, frames.ACK, sequence=8))),
    Forgery("unreachable", control(3, 1), (4,)),
    Forgery("too-big", control(3, 4), (4,)),
    Forgery("unreachable", control(1), (6,)),
    Forgery("too-big", control(2), (6,)),
    Forgery("router-advertisement", control(ROUTER_ADVERTISEMENT), (6,)),
    Forgery("solicitation", control(SOLICITATION), (6,)),
    Forgery("advertisement", control(ADVERTISEMENT), (6,)),
    Forgery("membership", lambda _: (frames.IGMP, bytes((0x11, 0, 0xEE, 0xFF)) + bytes(4)), (4,)),
    Forgery("gre", lambda _: (GRE, bytes(4) + b"forged"), requests_first=GRE),
    Forgery("esp", lambda _: (frames.ESP, bytes(8) + b"forged"), requests_first=frames.ESP),
    Forgery("ipip", lambda _: (IPIP, b"forged" * 4), requests_first=IPIP),
)
CASES = [(forgery, version) for forgery in FORGERIES for version in forgery.versions]


def by_raw_socket(watched: PodState, ends: frames.Ends, packet: bytes) -> None:
    target = Target(str(ends.pod), watched.pod.interface, guarded.TCP_PORT, guarded.UDP_PORT)
    syns.send_whole(target, packet)


def by_packet_socket(watched: PodState, ends: frames.Ends, packet: bytes) -> None:
    ethertype = frames.ETHERTYPE_IPV4 if ends.family == 4 else frames.ETHERTYPE_IPV6
    with links.packet_socket(watched.pod.interface) as sock:
        wire.send(sock, frames.ethernet(ends, ethertype, packet))


Send = Callable[[PodState, frames.Ends, bytes], None]


def ends_of(watched: PodState, version: int) -> frames.Ends:
    """From the neighbour, another pod."""
    source = traffic.address(watched.neighbour, version)
    pod = traffic.address(watched.pod, version)
    return frames.Ends(frames.address(source), frames.address(pod), watched.mac)


@pytest.mark.parametrize(
    "send", [pytest.param(by_raw_socket, id="raw"), pytest.param(by_packet_socket, id="packet")]
)
@pytest.mark.parametrize(("forgery", "version"), CASES, ids=str)
def test_no_packet_in_the_name_of_a_peer_reaches_the_pod(
    watched: PodState, forgery: Forgery, version: int, send: Send
) -> None:
    ends = ends_of(watched, version)
    protocol, transport = forgery.build(ends)
    # Neighbour discovery needs a hop limit of 255.
    packet = (
        frames.ipv4(ends, protocol, transport)
        if version == 4
        else frames.ipv6(ends, protocol, transport, hop_limit=255)
    )

    def arrives() -> bool:
        if forgery.requests_first:
            send_first(watched, ends, forgery.requests_first)
        send(watched, ends, packet)
        return any(transport in frame for frame in watched.arrived(with_control=True))

    watched.set_mode(Mode.ENFORCE)
    assert not arrives()
    assert watched.moved() == {(Verdict.DROP, Reason.NODE): 1}
    watched.set_mode(Mode.OFF)
    assert arrives()


@pytest.mark.parametrize(
    "send", [pytest.param(by_raw_socket, id="raw"), pytest.param(by_packet_socket, id="packet")]
)
@pytest.mark.parametrize(("forgery", "version"), CASES[:6], ids=str)
def test_no_packet_in_the_name_of_a_peer_reaches_a_client_behind_the_pod(
    watched: PodState, forgery: Forgery, version: int, send: Send
) -> None:
    behind = {4: "198.18.77.1", 6: "fd00:18:77::1"}[version]
    via = labs.BRIDGE if watched.pod.is_bridged else watched.pod.interface
    onlink = "" if watched.pod.is_bridged else " onlink"
    links.ip(f"route add {behind} via {traffic.address(watched.pod, version)} dev {via}{onlink}")
    ends = dataclasses.replace(ends_of(watched, version), pod=frames.address(behind))
    protocol, transport = forgery.build(ends)

    def arrives() -> bool:
        send(watched, ends, frames.packet(ends, protocol, transport)[14:])
        return any(transport in frame for frame in watched.arrived(with_control=True))

    watched.set_mode(Mode.ENFORCE)
    assert not arrives()
    watched.set_mode(Mode.OFF)
    assert arrives()


def send_first(watched: PodState, ends: frames.Ends, protocol: int) -> None:
    family = traffic.family(ends.family)
    with watched.pod.open_socket(family, socket.SOCK_RAW, protocol) as sock:
        sock.sendto(bytes(8), (str(ends.source), 0))


def test_arp_of_a_packet_socket_does_not_reach_the_pod(watched: PodState) -> None:
    ends = ends_of(watched, 4)
    frame = frames.arp(ends, operation=2)

    def arrives() -> bool:
        with links.packet_socket(watched.pod.interface) as sock:
            wire.send(sock, frame)
        return any(frame[14:42] in seen for seen in watched.arrived(with_control=True))

    watched.set_mode(Mode.ENFORCE)
    assert not arrives()
    assert watched.moved() == {(Verdict.DROP, Reason.NODE): 1}
    watched.set_mode(Mode.OFF)
    assert arrives()


@pytest.mark.parametrize("version", [4, 6])
def test_frame_with_offloads_carries_no_data(watched: PodState, version: int) -> None:
    """Its IP header states that the segment is empty; the kernel corrects that behind the gate."""
    ends = ends_of(watched, version)
    segment = frames.tcp(ends, frames.ACK, data=b"injected" * 300)
    length = 20 + 20 * (version == 4)
    if version == 4:
        packet = frames.ipv4(ends, frames.TCP, segment, total_length=length)
        frame = frames.ethernet(ends, frames.ETHERTYPE_IPV4, packet)
    else:
        packet = frames.ipv6(ends, frames.TCP, segment, payload_length=length)
        frame = frames.ethernet(ends, frames.ETHERTYPE_IPV6, packet)
    start = len(frame) - len(segment)
    # NEEDS_CSUM; VIRTIO_NET_HDR_GSO_TCPV4 or _TCPV6; headers, segment size, checksum's place
    header = struct.pack("=BBHHHH", 1, 1 if version == 4 else 4, start + 20, 1000, start, 16)

    def arrives() -> bool:
        with links.packet_socket(watched.pod.interface) as sock:
            sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
            wire.send(sock, header + frame)
        return any(b"injected" in seen for seen in watched.arrived())

    watched.set_mode(Mode.ENFORCE)
    assert not arrives()
    watched.set_mode(Mode.OFF)
    assert arrives()


@pytest.fixture
def stamps(
    lab: labs.Lab, loaded: loader.Loaded, installation: pins.Pins
) -> Iterator[HostDevicePrograms]:
    made = HostDevicePrograms(loaded, installation, Attachment.CLSACT)
    yield made
    made.ensure_stamps(set())
    made.close()


@pytest.mark.parametrize("forgery", FORGERIES[:1], ids=str)
@pytest.mark.parametrize("version", [4, 6])
def test_forgery_put_into_the_loopback_does_not_reach_the_pod(
    watched: PodState, stamps: HostDevicePrograms, version: int, forgery: Forgery
) -> None:
    stranger = frames.address({4: "198.18.9.9", 6: "fd00:18:9::9"}[version])
    ends = dataclasses.replace(ends_of(watched, version), source=stranger, pod_mac=bytes(6))
    protocol, transport = forgery.build(ends)

    def arrives() -> bool:
        with links.packet_socket("lo") as sock:
            wire.send(sock, frames.packet(ends, protocol, transport))
        seen = watched.arrived(send_end_by_the_loopback(watched), with_control=True)
        return any(transport in frame for frame in seen)

    stamps.ensure_stamps({LOOPBACK_IFINDEX})
    watched.set_mode(Mode.ENFORCE)
    assert not arrives()
    assert watched.moved() == {(Verdict.DROP, Reason.NODE): 1}
    watched.set_mode(Mode.OFF)
    assert arrives()


def send_end_by_the_loopback(watched: PodState) -> Callable[[bytes], None]:
    """What is routed twice may be overtaken by what is routed once."""
    stranger = frames.address("198.18.9.9")
    ends = dataclasses.replace(
        ends_of(watched, 4), source=stranger, pod_mac=bytes(6), port=guarded.END_PORT
    )

    def send(end: bytes) -> None:
        with links.packet_socket("lo") as sock:
            wire.send(sock, frames.packet(ends, frames.UDP, frames.udp(ends, end)))

    return send


@pytest.mark.parametrize("version", [4, 6])
def test_a_rule_admits_what_a_raw_socket_sends(lab: labs.Lab, gates: Gates, version: int) -> None:
    pod, neighbour = lab.add_pod("web", 1), lab.add_pod("neighbour", 2)
    rule = Rule(SourceKind.ANY, OSPF)
    with (
        guarded.guarded(gates, pod, neighbour, rule) as watched,
        socket.socket(traffic.family(version), socket.SOCK_RAW, OSPF) as sock,
    ):
        watched.set_mode(Mode.ENFORCE)
        sock.sendto(b"hello-from-ospf", (traffic.address(pod, version), 0))
        assert any(b"hello-from-ospf" in frame for frame in watched.arrived())


_HOARDERS = 4
"""A process may have 20,000 descriptors here."""

_HOARD = """
import resource, socket, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept = [socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) for _ in range(int(sys.argv[1]))]
print("open", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _hoarding(count: int) -> Iterator[None]:
    """A process with as many raw sockets."""
    arguments = [sys.executable, "-c", _HOARD, str(count)]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield


def test_raw_sockets_have_no_limit(lab: labs.Lab, watched: PodState) -> None:
    """Otherwise one process could leave none for others, iptables and daemons of
    routing protocols included. What the last one sends is still a process's."""
    watched.set_mode(Mode.ENFORCE)
    with contextlib.ExitStack() as stack:
        for _ in range(_HOARDERS):
            stack.enter_context(_hoarding(abi.MAX_OLD_RAW_SOCKETS // _HOARDERS + 100))
        sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_RAW, frames.ICMP))
        destination = watched.pod.ipv4
        ends = frames.Ends(frames.address(traffic.NODE[4]), frames.address(destination), b"")
        sock.sendto(frames.icmp(ends, 3, 1), (destination, 0))
        watched.arrived()
    assert watched.moved() == {(Verdict.DROP, Reason.NODE): 1}


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_raw_sockets_from_before_the_hooks_are_recorded(
    lab: labs.Lab, loaded: loader.Loaded, family: int
) -> None:
    """Where the kernel lists them; elsewhere they are reported as unknown."""
    is_listed = offers.lists_raw_sockets()
    with socket.socket(family, socket.SOCK_RAW, OSPF) as sock:
        cookie = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), sys.byteorder)
        loaded.map(abi.OLD_RAW_SOCKETS).delete(struct.pack("=Q", cookie))
        with structlog.testing.capture_logs() as lines:
            record_raw_sockets(loaded)
        assert (cookie in OldRawSockets(loaded).cookies()) is is_listed
        reported = any(line["event"] == Event.RAW_SOCKETS_UNKNOWN for line in lines)
        assert reported is not is_listed
    assert cookie not in OldRawSockets(loaded).cookies()
