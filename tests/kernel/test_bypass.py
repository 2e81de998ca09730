"""An attacker on the node opens flows with sockets of every kind: no packet reaches the pod.

Each attempt is repeated with the gate off and must reach the pod, which shows that the attempt
itself works. That comes second, because the last packets of a connection would be counted.
"""

import ipaddress
import socket
import struct

import pytest

from agent.lab import lab as labs
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, links, offers, syns, traffic
from tests.kernel.guarded import PodState
from tests.kernel.syns import FirstPacket, Target

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
NODE_DROPPED = (Verdict.DROP, Reason.NODE)
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}


def target_of(watched: PodState, version: int) -> Target:
    pod = watched.pod
    interface = labs.BRIDGE if pod.is_bridged else pod.interface
    address = traffic.address(pod, version)
    return Target(address, interface, guarded.TCP_PORT, guarded.UDP_PORT)


def expect_closed(watched: PodState, reason: Reason) -> None:
    """Nothing arrived, and the packet was counted with this reason, at this pod only."""
    assert watched.arrived() == []
    assert watched.moved().keys() == {(Verdict.DROP, reason)}
    assert watched.moved_at_neighbour() == {}


@pytest.mark.parametrize(
    ("first_packet", "version"),
    [
        (first_packet, version)
        for first_packet in syns.FIRST_PACKETS
        for version in first_packet.versions
    ],
    ids=lambda value: str(value),
)
def test_no_socket_of_the_node_reaches_the_pod(
    watched: PodState, first_packet: FirstPacket, version: int
) -> None:
    target = target_of(watched, version)
    watched.set_mode(Mode.ENFORCE)
    offers.attempt(first_packet, target)
    expect_closed(watched, Reason.NODE)

    watched.set_mode(Mode.OFF)
    offers.attempt(first_packet, target)
    assert any(first_packet.shows in frame for frame in watched.arrived())


def beginning_of(watched: PodState, version: int) -> bool:
    """Sends a datagram in fragments; whether the first of them reached the pod."""
    target = target_of(watched, version)
    with syns.datagram(target.family) as sock:
        data = b"the-beginning" + bytes(5000)
        sock.sendto(data, (target.address, target.udp_port))
    return any(b"the-beginning" in frame for frame in watched.arrived())


@VERSIONS
def test_long_datagram_loses_all_its_fragments(watched: PodState, version: int) -> None:
    watched.set_mode(Mode.ENFORCE)
    assert not beginning_of(watched, version)
    moved = watched.moved()
    assert moved.pop(NODE_DROPPED) == 1
    assert moved.keys() <= {(Verdict.DROP, Reason.FRAGMENT)}
    assert watched.moved_at_neighbour() == {}
    watched.set_mode(Mode.OFF)
    assert beginning_of(watched, version)


@pytest.mark.parametrize(
    "address", ["224.0.0.1", "255.255.255.255", "ff02::1"], ids=["group", "broadcast", "group6"]
)
def test_broadcast_and_multicast_of_the_host_reach_no_pod(watched: PodState, address: str) -> None:
    """Every host belongs to these groups, whether or not an application joined it."""
    target = target_of(watched, 6 if ":" in address else 4)

    def send() -> bool:
        with syns.datagram(target.family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            name = target.interface.encode()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
            sock.sendto(b"to-everybody", (address, target.udp_port))
        return any(b"to-everybody" in frame for frame in watched.arrived())

    watched.set_mode(Mode.ENFORCE)
    assert not send()
    assert watched.moved().keys() == {(Verdict.DROP, Reason.STRAY)}
    watched.set_mode(Mode.OFF)
    assert send()


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@VERSIONS
def test_translated_address_does_not_bypass_the_gate(
    watched: PodState, protocol: str, version: int
) -> None:
    """A service's address, and a port of the host (a NodePort), as kube-proxy makes them."""
    pod = target_of(watched, version)
    service = SERVICE[version]
    family = "ip" if version == 4 else "ip6"
    to = pod.address if version == 4 else f"[{pod.address}]"
    port = pod.tcp_port if protocol == "tcp" else pod.udp_port
    rules = "".join(
        f"chain {hook} {{ type nat hook {hook} priority -100;\n"
        f"{family} daddr {service} {protocol} dport {port} dnat to {pod.address}\n"
        f"{family} daddr {traffic.NODE[version]} {protocol} dport 30080 dnat to {to}:{port}\n}}\n"
        for hook in ("prerouting", "output")
    )
    begin = syns.connect_and_reset if protocol == "tcp" else syns.send_datagram
    ways = [
        Target(service, pod.interface, port, port),
        Target(traffic.NODE[version], pod.interface, 30080, 30080),
    ]
    with links.table(family, rules), links.route(service, "lo"):
        for way in ways:
            watched.set_mode(Mode.ENFORCE)
            begin(way)
            expect_closed(watched, Reason.NODE)
            watched.set_mode(Mode.OFF)
            begin(way)
            assert watched.arrived()


@VERSIONS
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "fragments"])
def test_raw_socket_cannot_inject_into_a_connection_of_two_pods(
    watched: PodState, version: int, is_whole: bool
) -> None:
    """It knows all numbers of the connection; the node tracks connections, and so defragments."""
    target = target_of(watched, version)
    tracking = "chain c { type filter hook output priority 0; ct state new accept; }"
    watched.set_mode(Mode.ENFORCE)
    with (
        watched.neighbour.open_socket(target.family, socket.SOCK_STREAM) as client,
        links.table("inet", tracking),
    ):
        client.connect((target.address, target.tcp_port))
        packets = forge(watched.arrived()[-1], is_whole)
        for packet in packets:
            syns.send_whole(target, packet)
        assert not any(b"injected" in frame for frame in watched.arrived())
        reason = Reason.NODE if is_whole else Reason.FRAGMENT
        assert watched.moved().keys() == {(Verdict.DROP, reason)}

        watched.set_mode(Mode.OFF)
        for packet in packets:
            syns.send_whole(target, packet)
        assert any(b"injected" in frame for frame in watched.arrived())


def forge(frame: bytes, is_whole: bool) -> list[bytes]:
    """The next segments of the connection of `frame`, a bare ACK, as IP packets."""
    is_ipv4 = frame[12:14] == frames.ETHERTYPE_IPV4.to_bytes(2, "big")
    start, length = (26, 4) if is_ipv4 else (22, 16)
    source, pod = (ipaddress.ip_address(frame[at : at + length]) for at in (start, start + length))
    ports_and_numbers = struct.unpack_from("!HHII", frame, start + 2 * length)
    ends = frames.Ends(source, pod, source_port=ports_and_numbers[0], port=ports_and_numbers[1])
    segment = frames.tcp(
        ends,
        frames.ACK | frames.PSH,
        data=b"injected" * 2,
        sequence=ports_and_numbers[2],
        acknowledged=ports_and_numbers[3],
    )
    if is_whole:
        return [syns.packet(ends, frames.TCP, segment)]
    halves = []
    for offset, part in ((0, segment[:24]), (24, segment[24:])):
        is_first = offset == 0
        if is_ipv4:
            bits = frames.MORE_FRAGMENTS if is_first else offset // 8
            halves.append(frames.ipv4(ends, frames.TCP, part, fragment=bits))
        else:
            header = frames.fragment_header(frames.TCP, offset, more=is_first, identification=7)
            halves.append(frames.ipv6(ends, frames.FRAGMENT, header + part))
    return halves
