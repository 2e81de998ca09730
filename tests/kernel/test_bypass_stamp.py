"""Packets of the host that come back without socket and interface, or from the wire."""

import contextlib
import dataclasses
import itertools
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from bpf import loader, pins
from bpf.host_devices import LOOPBACK_IFINDEX, HostDevicePrograms
from bpf.verdicts import Mode, Reason, Verdict
from tests import polling
from tests.kernel import frames, guarded, links, syns, traffic, wire
from tests.kernel.guarded import PodState
from tests.kernel.test_bypass_reentry import programs
from tests.kernel.test_untouched import tracked

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
IPV6_UNICAST_IF = 76
FAMILY = {4: "ip", 6: "ip6"}
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}
NODE_DROPPED = (Verdict.DROP, Reason.NODE)


@pytest.fixture
def devices(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[HostDevicePrograms]:
    with programs(loaded, installation) as made:
        yield made


def fragments(ends: frames.Ends, protocol: int, payload: bytes, number: int) -> Iterator[bytes]:
    """Two, with a routing header in the first: what conntrack puts together the kernel cannot take
    apart as it was, so it makes others."""
    whole = frames.routing(protocol, 0) + payload
    for start, end in ((0, 48), (48, len(whole))):
        header = frames.fragment_header(
            frames.ROUTING, start, more=start == 0, identification=number
        )
        packet = frames.ipv6(ends, frames.FRAGMENT, header + whole[start:end])
        yield frames.ethernet(ends, frames.ETHERTYPE_IPV6, packet)


def ends_of(watched: PodState, port: int) -> frames.Ends:
    source, pod = frames.address(syns.STRANGER[6]), frames.address(watched.pod.ipv6)
    return frames.Ends(source, pod, bytes(6), port=port)


@pytest.mark.parametrize(
    ("protocol", "reason"), [(frames.TCP, Reason.FRAGMENT), (frames.UDP, Reason.NODE)]
)
def test_fragments_on_the_loopback_that_the_kernel_makes_again_are_dropped(
    watched: PodState, devices: HostDevicePrograms, protocol: int, reason: Reason
) -> None:
    port = guarded.TCP_PORT if protocol == frames.TCP else guarded.UDP_PORT
    ends, to_end = ends_of(watched, port), ends_of(watched, guarded.END_PORT)
    payload = (
        frames.tcp(ends, frames.SYN, data=bytes(200))
        if protocol == frames.TCP
        else frames.udp(ends, bytes(200))
    )
    numbers = itertools.count(1)
    with tracked(), links.packet_socket("lo") as sock:

        def send() -> None:
            for fragment in fragments(ends, protocol, payload, next(numbers)):
                wire.send(sock, fragment)

        def end(marker: bytes) -> None:
            wire.send(sock, frames.packet(to_end, frames.UDP, frames.udp(to_end, marker)))

        def reaches() -> bool:
            send()
            return bool(watched.arrived(end))

        polling.wait_until("the path works", reaches)
        watched.set_mode(Mode.ENFORCE)
        if protocol == frames.UDP:
            assert reaches()  # forwarded, according to the gate
            assert watched.moved() == {(Verdict.PASS, Reason.FORWARDED): 1}
        devices.ensure_stamps({LOOPBACK_IFINDEX})
        assert not reaches()
        assert watched.moved() == {(Verdict.DROP, reason): 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Uplink:
    """Behind it is a router that sends packets to pods back to the node. No port of a bridge."""

    watched: PodState
    interface: str
    mac: bytes
    devices: HostDevicePrograms

    def guard(self) -> None:
        self.devices.ensure_uplinks({links.index_of(self.interface)})


@pytest.fixture
def uplink(watched: PodState, lab: labs.Lab, devices: HostDevicePrograms) -> Iterator[Uplink]:
    router = lab.add_pod("router", 9)
    links.let_forward(router)
    with router.open_socket(socket.AF_PACKET, socket.SOCK_RAW) as inside:
        inside.bind(("eth0", 0))
        mac = inside.getsockname()[4]
    with contextlib.ExitStack() as stack:
        # Answers of the pod to strangers go back and forth, and Linux 5.10 sends it a redirect.
        for name in ("all", router.interface):
            stack.enter_context(links.sysctl(f"net/ipv4/conf/{name}/send_redirects", "0"))
        for version in (4, 6):
            gateway = traffic.address(router, version)
            stack.enter_context(links.default_route(gateway, router.interface))
        yield Uplink(watched, router.interface, mac, devices)


def send_unicast_if(uplink: Uplink, version: int) -> None:
    """Any process may do this."""
    with syns.datagram(socket.AF_INET6) as sock:
        index = struct.pack("!I", links.index_of(uplink.interface))
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_UNICAST_IF, index)
        with contextlib.suppress(OSError):
            sock.sendto(b"by-the-uplink", (uplink.watched.pod.ipv6, guarded.UDP_PORT))


def send_bound(uplink: Uplink, version: int) -> None:
    with syns.datagram(socket.AF_INET6) as sock:
        name = uplink.interface.encode()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
        with contextlib.suppress(OSError):
            sock.sendto(b"by-the-uplink", (uplink.watched.pod.ipv6, guarded.UDP_PORT))


def connect_bound(uplink: Uplink, version: int) -> None:
    with syns.stream(socket.AF_INET6) as sock:
        name = uplink.interface.encode()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
        sock.connect_ex((uplink.watched.pod.ipv6, guarded.TCP_PORT))


def send_frame(uplink: Uplink, version: int) -> None:
    source = frames.address(syns.STRANGER[version])
    pod = frames.address(traffic.address(uplink.watched.pod, version))
    ends = frames.Ends(source, pod, uplink.mac, port=guarded.TCP_PORT)
    with links.packet_socket(uplink.interface) as sock:
        wire.send(sock, frames.segment(ends, frames.SYN))


BY_UPLINK = pytest.mark.parametrize(
    ("send", "version"),
    [
        *((send, 6) for send in (send_unicast_if, send_bound, connect_bound)),
        *((send_frame, version) for version in (4, 6)),
    ],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)


@BY_UPLINK
def test_packet_for_a_pod_by_the_uplink_does_not_come_back(
    uplink: Uplink, send: Callable[[Uplink, int], None], version: int
) -> None:
    watched = uplink.watched
    watched.set_mode(Mode.ENFORCE)
    send(uplink, version)
    assert watched.arrived(end_by(uplink))  # forwarded, according to the gate
    assert NODE_DROPPED not in watched.moved()
    uplink.guard()
    send(uplink, version)
    assert watched.arrived(end_by(uplink)) == []
    assert watched.moved() == {NODE_DROPPED: 1}


def end_by(uplink: Uplink) -> Callable[[bytes], None]:
    """A rule admits it, so it takes the same path."""
    source = frames.address(syns.STRANGER[4])
    pod = frames.address(uplink.watched.pod.ipv4)
    ends = frames.Ends(source, pod, uplink.mac, port=guarded.END_PORT)

    def send(marker: bytes) -> None:
        with links.packet_socket(uplink.interface) as sock:
            wire.send(sock, frames.packet(ends, frames.UDP, frames.udp(ends, marker)))

    return send


@VERSIONS
def test_host_still_talks_to_others_by_the_uplink(
    uplink: Uplink, lab: labs.Lab, version: int
) -> None:
    uplink.watched.set_mode(Mode.ENFORCE)
    uplink.guard()
    router = lab.pods["router"]
    with router.listen(guarded.TCP_PORT):
        assert traffic.node_reaches(router, version, guarded.TCP_PORT)
    with traffic.listen_on_node(8080) as listening:
        traffic.pod_connects(router, traffic.NODE[version], version, listening)


@VERSIONS
def test_no_stamp_leaves_by_the_uplink(uplink: Uplink, lab: labs.Lab, version: int) -> None:
    """Nodes that are containers share a kernel: another node's gate takes the packet as from
    outside, as it does where there is a wire between them. Here the router sends it back."""
    router = lab.pods["router"]
    family, service = FAMILY[version], SERVICE[version]
    pod = traffic.address(uplink.watched.pod, version)
    body = (
        f"chain in {{ type nat hook prerouting priority -100;\n"
        f"{family} daddr {service} dnat to {pod}\n}}\n"
        f"chain out {{ type nat hook postrouting priority 100;\n"
        f"{family} daddr {pod} masquerade\n}}\n"
    )
    uplink.watched.set_mode(Mode.ENFORCE)
    uplink.guard()
    with links.table_inside(router, family, body), syns.stream(traffic.family(version)) as sock:
        sock.setblocking(True)
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect((service, guarded.TCP_PORT))
