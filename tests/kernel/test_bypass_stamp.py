"""Packets of the host that come back without socket and interface, or from the wire."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

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
FAMILY = {4: "ip", 6: "ip6"}
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}


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


def ends_to_service(port: int) -> frames.Ends:
    """Which is no pod's address, so the loopback's program only stamps what it is sent."""
    source, service = frames.address(syns.STRANGER[6]), frames.address(SERVICE[6])
    return frames.Ends(source, service, bytes(6), port=port)


@pytest.mark.parametrize(
    ("protocol", "reason"), [(frames.TCP, Reason.FRAGMENT), (frames.UDP, Reason.NODE)]
)
def test_fragments_on_the_loopback_that_the_kernel_makes_again_are_dropped(
    watched: PodState, devices: HostDevicePrograms, protocol: int, reason: Reason
) -> None:
    port = guarded.TCP_PORT if protocol == frames.TCP else guarded.UDP_PORT
    ends, to_end = ends_to_service(port), ends_to_service(guarded.END_PORT)
    payload = (
        frames.tcp(ends, frames.SYN, data=bytes(200))
        if protocol == frames.TCP
        else frames.udp(ends, bytes(200))
    )
    numbers = itertools.count(1)
    to_pod = f"ip6 daddr {SERVICE[6]} dnat to {watched.pod.ipv6}"
    rules = f"chain in {{ type nat hook prerouting priority -100;\n{to_pod}\n}}"
    with tracked(), links.table("ip6", rules), links.packet_socket("lo") as sock:

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
        devices.ensure_hand_made({LOOPBACK_IFINDEX})
        assert not reaches()
        assert watched.moved() == {(Verdict.DROP, reason): 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Uplink:
    """Behind it is a router that sends packets to pods back to the node. No port of a bridge."""

    watched: PodState
    interface: str
    devices: HostDevicePrograms

    def guard(self) -> None:
        self.devices.ensure_uplinks({links.index_of(self.interface)})


@pytest.fixture
def uplink(watched: PodState, lab: labs.Lab, devices: HostDevicePrograms) -> Iterator[Uplink]:
    router = lab.add_pod("router", 9)
    links.let_forward(router)
    with contextlib.ExitStack() as stack:
        # Answers of the pod to strangers go back and forth, and Linux 5.10 sends it a redirect.
        for name in ("all", router.interface):
            stack.enter_context(links.sysctl(f"net/ipv4/conf/{name}/send_redirects", "0"))
        for version in (4, 6):
            gateway = traffic.address(router, version)
            stack.enter_context(links.default_route(gateway, router.interface))
        yield Uplink(watched, router.interface, devices)


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
