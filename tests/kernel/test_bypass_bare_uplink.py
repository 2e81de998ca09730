"""An uplink without Ethernet header, such as WireGuard's, PPP's or a VPN's tun, and a router behind
it that sends packets for pods back to the node.

Each packet is shown to come in while the uplink has no program, as one of another host.
"""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from agent.gates.host_devices import programs_for
from agent.linux.rtnetlink import Link
from bpf import loader, pins
from bpf.host_devices import HostDevicePrograms
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, links, syns, traffic
from tests.kernel.guarded import PodState
from tests.kernel.test_bypass_reentry import programs

pytestmark = pytest.mark.kernel

_TUN_BYTES = 1 << 16
_ETHERNET_BYTES = 14


@dataclasses.dataclass(frozen=True, slots=True)
class Uplink:
    """A tun with the default routes. `descriptor` is the router's side."""

    watched: PodState
    interface: str
    descriptor: int
    devices: HostDevicePrograms

    def send_back(self) -> None:
        """What has left by the uplink for the pod."""
        own = {address.packed for address in self.watched.pod.addresses}
        while True:
            try:
                packet = os.read(self.descriptor, _TUN_BYTES)
            except BlockingIOError:
                return
            if own & {packet[16:20], packet[24:40]}:
                os.write(self.descriptor, packet)

    def send_frame(self, frame: bytes) -> None:
        """By a packet socket, without the Ethernet header."""
        version = frame[_ETHERNET_BYTES] >> 4
        ethertype = frames.ETHERTYPE_IPV4 if version == 4 else frames.ETHERTYPE_IPV6
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as sock, links.drop_is_enobufs():
            sock.sendto(frame[_ETHERNET_BYTES:], (self.interface, ethertype))

    def send_end(self, marker: bytes) -> None:
        """A rule admits it, so it takes the same path."""
        source = frames.address(syns.STRANGER[4])
        pod = frames.address(self.watched.pod.ipv4)
        ends = frames.Ends(source, pod, port=guarded.END_PORT)
        self.send_frame(frames.packet(ends, frames.UDP, frames.udp(ends, marker)))
        self.send_back()


@pytest.fixture
def uplink(watched: PodState, loaded: loader.Loaded, installation: pins.Pins) -> Iterator[Uplink]:
    with programs(loaded, installation) as devices, links.tun() as (name, descriptor):
        os.set_blocking(descriptor, False)
        links.ip(f"route add 0.0.0.0/0 dev {name}", f"route add ::/0 dev {name}")
        yield Uplink(watched, name, descriptor, devices)


def send_datagram(uplink: Uplink, version: int) -> None:
    """Any process may do this, over IPv6."""
    with _bound(uplink, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.sendto(b"by-the-uplink", (uplink.watched.pod.ipv6, guarded.UDP_PORT))


def connect(uplink: Uplink, version: int) -> None:
    with _bound(uplink, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        sock.connect_ex((uplink.watched.pod.ipv6, guarded.TCP_PORT))


def _bound(uplink: Uplink, kind: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, uplink.interface.encode())
    return sock


def send_syn(uplink: Uplink, version: int) -> None:
    source = frames.address(syns.STRANGER[version])
    pod = frames.address(traffic.address(uplink.watched.pod, version))
    ends = frames.Ends(source, pod, port=guarded.TCP_PORT)
    uplink.send_frame(frames.segment(ends, frames.SYN))


def send_fragments(uplink: Uplink, version: int) -> None:
    with _bound(uplink, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.sendto(bytes(4000), (uplink.watched.pod.ipv6, guarded.UDP_PORT))


@pytest.mark.parametrize(
    ("send", "version"),
    [
        *((send, 6) for send in (send_datagram, connect, send_fragments)),
        *((send_syn, version) for version in (4, 6)),
    ],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
def test_packet_for_a_pod_by_the_uplink_does_not_come_back(
    uplink: Uplink, send: Callable[[Uplink, int], None], version: int
) -> None:
    watched = uplink.watched
    watched.set_mode(Mode.ENFORCE)
    send(uplink, version)
    uplink.send_back()
    assert watched.arrived(uplink.send_end)  # forwarded, according to the gate
    assert (Verdict.DROP, Reason.NODE) not in watched.moved()
    uplink.devices.ensure_bare_devices({links.index_of(uplink.interface)})
    send(uplink, version)
    uplink.send_back()
    assert watched.arrived(uplink.send_end) == []
    assert watched.moved().keys() <= {(Verdict.DROP, Reason.NODE), (Verdict.DROP, Reason.FRAGMENT)}
    assert watched.moved_at_neighbour() == {}


@pytest.mark.parametrize("version", [4, 6])
def test_host_still_talks_to_others_by_the_uplink(uplink: Uplink, version: int) -> None:
    uplink.watched.set_mode(Mode.ENFORCE)
    uplink.devices.ensure_bare_devices({links.index_of(uplink.interface)})
    other = syns.STRANGER[version]
    with socket.socket(traffic.family(version), socket.SOCK_DGRAM) as sock:
        sock.sendto(b"to-another", (other, guarded.UDP_PORT))
        sent = os.read(uplink.descriptor, _TUN_BYTES)
        while b"to-another" not in sent:  # the kernel's own, such as router solicitations
            sent = os.read(uplink.descriptor, _TUN_BYTES)


def test_agent_guards_each_device_without_ethernet() -> None:
    found = [
        Link(2, "wg0", kind="wireguard", is_ethernet=False),
        Link(3, "ppp0", kind="ppp", is_ethernet=False),
        Link(4, "vpn0", kind="tun", is_ethernet=False),
        Link(5, "mine0", kind="tun", is_ethernet=False),
        Link(6, "vxlan0", kind="vxlan"),
    ]
    needed = programs_for(found, gated={9}, enforced={9}, tuns={5})
    assert needed.bare_devices == {2, 3, 4}
    assert needed.devices == {6}
    assert needed.tuns == {5}
