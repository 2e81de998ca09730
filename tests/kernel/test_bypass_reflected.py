"""A process writes packets in the name of a pod, by the loopback or a veth pair within the node:
the node itself answers them to the pod, and joins them with packets of other pods.

Each packet is shown to have its effect without the program where it leaves.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from bpf import loader, pins
from bpf.gates import Gates
from bpf.host_devices import LOOPBACK_IFINDEX, HostDevicePrograms
from bpf.replies import GROUP_LIFETIME_NS, ReplyFlow
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, links, traffic, wire
from tests.kernel.guarded import PodState
from tests.kernel.test_bypass_fragments import LENGTH, PLANTED, ends_of, fragment, send_from
from tests.kernel.test_bypass_reentry import programs
from tests.kernel.test_replies import fill
from tests.kernel.test_untouched import tracked

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
REFLECTED = b"reflected bytes!"
CLOSED_PORT = 47
DHCP_SERVER, DHCP_CLIENT = 67, 68
UNREACHABLE = {4: 3, 6: 1}
TIME_EXCEEDED = {4: 11, 6: 3}


@contextlib.contextmanager
def by_loopback(devices: HostDevicePrograms) -> Iterator[tuple[str, bytes, Callable[[], None]]]:
    yield "lo", bytes(6), lambda: devices.ensure_loopbacks({LOOPBACK_IFINDEX})


@contextlib.contextmanager
def by_pair(devices: HostDevicePrograms) -> Iterator[tuple[str, bytes, Callable[[], None]]]:
    with links.pair() as (one, other):
        yield (
            *(one, links.mac_of(other)),
            lambda: devices.ensure_devices({links.index_of(one)}),
        )


def with_hop_limit_one(packet: bytes) -> bytes:
    """An Ethernet frame with IP."""
    frame = bytearray(packet)
    if frame[14] >> 4 == 6:
        frame[14 + 7] = 1
        return bytes(frame)
    frame[14 + 8] = 1
    frame[24:26] = bytes(2)
    frame[24:26] = frames.checksum(bytes(frame[14:34])).to_bytes(2, "big")
    return bytes(frame)


def errors(seen: list[bytes], version: int, type_: int) -> list[bytes]:
    at = 34 if version == 4 else 54
    protocol = frames.ICMP if version == 4 else frames.ICMPV6
    return [
        frame
        for frame in seen
        if frame[23 if version == 4 else 20] == protocol and frame[at] == type_
    ]


@pytest.mark.parametrize("way", [by_loopback, by_pair], ids=["loopback", "pair"])
@pytest.mark.parametrize("kind", ["closed port", "time exceeded"])
@VERSIONS
def test_node_reflects_nothing_that_a_process_writes_in_a_pod_s_name(
    watched: PodState,
    loaded: loader.Loaded,
    installation: pins.Pins,
    way: Callable[..., contextlib.AbstractContextManager[tuple[str, bytes, Callable[[], None]]]],
    kind: str,
    version: int,
) -> None:
    """Its bytes would be in an error about a packet of the pod, which may end a connection."""
    pod = frames.address(traffic.address(watched.pod, version))
    is_local = kind == "closed port"
    to = frames.address(
        traffic.NODE[version] if is_local else traffic.address(watched.neighbour, version)
    )
    type_ = (UNREACHABLE if is_local else TIME_EXCEEDED)[version]
    with programs(loaded, installation) as devices, way(devices) as (interface, mac, guard):
        ends = frames.Ends(pod, to, mac, port=CLOSED_PORT)
        frame = frames.packet(ends, frames.UDP, frames.udp(ends, REFLECTED, has_checksum=True))
        if not is_local:
            frame = with_hop_limit_one(frame)

        def reflected() -> list[bytes]:
            with links.packet_socket(interface) as sock:
                wire.send(sock, frame)
            return errors(watched.arrived(with_control=True), version, type_)

        watched.set_mode(Mode.ENFORCE)
        assert reflected()
        guard()
        assert not reflected()
    assert watched.moved() == {(Verdict.DROP, Reason.NODE): 1}


@pytest.mark.usefixtures("attached_hooks")
def test_answer_of_dhcp_that_a_process_writes_passes_for_ten_seconds(
    watched: PodState, loaded: loader.Loaded
) -> None:
    """A pod renews its address from its server, whose daemon answers with a packet socket. Any
    process with one may answer in that name, and does not prolong the time."""
    server = frames.address(traffic.NODE[4])
    watched.set_mode(Mode.ENFORCE)
    for pod, age_ns in ((watched.pod, GROUP_LIFETIME_NS + 10**9), (watched.neighbour, 10**9)):
        own = frames.address(pod.ipv4)
        flow = ReplyFlow(frames.UDP, own, DHCP_CLIENT, server, DHCP_SERVER)
        fill(loaded, pod, flow, time.monotonic_ns() - age_ns)
        ends = frames.Ends(server, own, watched.mac, source_port=DHCP_SERVER, port=DHCP_CLIENT)
        with links.packet_socket(pod.interface) as sock:
            wire.send(sock, frames.packet(ends, frames.UDP, frames.udp(ends, b"acknowledged")))
    watched.arrived()
    assert watched.moved() == {(Verdict.DROP, Reason.NODE): 1}
    assert watched.moved_at_neighbour() == {(Verdict.PASS, Reason.REPLY): 1}


@VERSIONS
def test_no_bytes_can_be_planted_in_a_datagram_of_another_pod_by_the_loopback(
    lab: labs.Lab, gates: Gates, loaded: loader.Loaded, installation: pins.Pins, version: int
) -> None:
    """Connection tracking puts fragments together whatever they came in by. Of IPv6 each keeps its
    interface, so the gate sees what came in by the loopback."""
    with (
        guarded.guarded(gates, lab.add_pod("web", 1), lab.add_pod("neighbour", 2)) as watched,
        programs(loaded, installation) as devices,
        tracked(),
    ):
        neighbour = traffic.address(watched.neighbour, version)
        pod = traffic.address(watched.pod, version)
        ends = ends_of(watched, version, neighbour)
        whole = frames.udp(ends, bytes(LENGTH - 8) + PLANTED)
        honest = frames.udp(ends, bytes(LENGTH - 8 + len(PLANTED)))
        ethertype = frames.ETHERTYPE_IPV4 if version == 4 else frames.ETHERTYPE_IPV6

        def arrived(number: int) -> list[bytes]:
            """After both fragments of the neighbour, and the planted one between them."""
            first, last = whole[:LENGTH], honest[LENGTH:]
            send_from(watched.neighbour, version, pod, fragment(ends, first, 0, number))
            with links.packet_socket("lo") as sock:
                planted = fragment(ends, PLANTED, LENGTH, number)
                on_loopback = dataclasses.replace(ends, pod_mac=bytes(6))
                wire.send(sock, frames.ethernet(on_loopback, ethertype, planted))
            send_from(watched.neighbour, version, pod, fragment(ends, last, LENGTH, number))
            return watched.arrived()

        watched.set_mode(Mode.ENFORCE)
        if version == 4:
            assert any(PLANTED in frame for frame in arrived(7))
        devices.ensure_loopbacks({LOOPBACK_IFINDEX})
        seen = arrived(8)
        assert not any(PLANTED in frame for frame in seen)
        assert any(bytes(LENGTH - 8) in frame for frame in seen)
