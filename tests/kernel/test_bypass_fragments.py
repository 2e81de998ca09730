"""A later fragment has no transport header. An attacker on the node sends one in another's name, to
put its bytes into a datagram that the pod is about to receive.

Each attempt is repeated with the gate off and must reach the pod.
"""

import socket
from collections.abc import Callable

import pytest

from agent.lab.lab import LabPod
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, offers, syns, traffic, wire
from tests.kernel.guarded import PodState
from tests.kernel.syns import Target

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
PLANTED = b"planted!" * 2
LENGTH = 1024
IPV6_ID_OFFSET = 14 + 40 + 4

_ETH_P_ALL = 3


def ends_of(watched: PodState, version: int, source: str) -> frames.Ends:
    pod = frames.address(traffic.address(watched.pod, version))
    port = guarded.UDP_PORT
    return frames.Ends(frames.address(source), pod, watched.mac, source_port=31000, port=port)


def fragment(ends: frames.Ends, payload: bytes, offset: int, number: int) -> bytes:
    """An IP packet: the first fragment, or the last at this offset."""
    is_first = offset == 0
    if ends.family == 4:
        bits = frames.MORE_FRAGMENTS if is_first else offset // 8
        packet = bytearray(frames.ipv4(ends, frames.UDP, payload, fragment=bits))
        packet[4:6] = number.to_bytes(2, "big")
        packet[10:12] = bytes(2)
        packet[10:12] = frames.checksum(bytes(packet[:20])).to_bytes(2, "big")
        return bytes(packet)
    header = frames.fragment_header(frames.UDP, offset, more=is_first, identification=number)
    return frames.ipv6(ends, frames.FRAGMENT, header + payload)


def send_from(pod: LabPod, version: int, target: str, packet: bytes) -> None:
    with pod.open_socket(traffic.family(version), socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        if version == 6:
            sock.setsockopt(socket.IPPROTO_IPV6, syns.IPV6_HDRINCL, 1)
        sock.sendto(packet, (target, 0))


def by_raw_socket(watched: PodState, ends: frames.Ends, packet: bytes) -> None:
    if not sends_fragments(ends.family):
        pytest.skip(f"{offers.NOT_OFFERED}end of defragmentation with its rules (Linux 5.13)")
    target = Target(str(ends.pod), watched.pod.interface, guarded.TCP_PORT, guarded.UDP_PORT)
    syns.send_whole(target, packet)


def sends_fragments(version: int) -> bool:
    """Whether a later fragment leaves a raw socket.

    Before de8c12110a13 (Linux 5.13) a namespace that once tracked connections holds it back.
    """
    address = syns.LOOPBACK[version]
    ends = frames.Ends(frames.address(address), frames.address(address))
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sock:
        sock.bind(("lo", _ETH_P_ALL))
        syns.send_whole(Target(address, "lo", 0, 0), fragment(ends, PLANTED, LENGTH, 9))
        try:
            while PLANTED not in sock.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return False
    return True


def by_packet_socket(watched: PodState, ends: frames.Ends, packet: bytes) -> None:
    ethertype = frames.ETHERTYPE_IPV4 if ends.family == 4 else frames.ETHERTYPE_IPV6
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sock:
        sock.bind((watched.pod.interface, 0))
        wire.send(sock, frames.ethernet(ends, ethertype, packet))


Send = Callable[[PodState, frames.Ends, bytes], None]
WAYS = pytest.mark.parametrize(
    "send",
    [pytest.param(by_raw_socket, id="raw"), pytest.param(by_packet_socket, id="packet")],
)


@WAYS
@VERSIONS
def test_no_bytes_can_be_planted_in_a_datagram_of_another_pod(
    watched: PodState, version: int, send: Send
) -> None:
    neighbour = traffic.address(watched.neighbour, version)
    ends = ends_of(watched, version, neighbour)
    beginning = frames.udp(ends, bytes(LENGTH - 8 + len(PLANTED)))[:LENGTH]

    def plant(number: int) -> bool:
        address = traffic.address(watched.pod, version)
        send_from(watched.neighbour, version, address, fragment(ends, beginning, 0, number))
        send(watched, ends, fragment(ends, PLANTED, LENGTH, number))
        return any(PLANTED in frame for frame in watched.arrived())

    watched.set_mode(Mode.ENFORCE)
    assert not plant(7)
    assert watched.moved() == {(Verdict.DROP, Reason.FRAGMENT): 1}
    watched.set_mode(Mode.OFF)
    assert plant(8)


@WAYS
@VERSIONS
def test_no_bytes_can_be_planted_in_an_answer_of_the_node(
    watched: PodState, version: int, send: Send
) -> None:
    pod = watched.pod
    family = traffic.family(version)

    def plant() -> bool:
        with (
            pod.open_socket(family, socket.SOCK_DGRAM) as client,
            socket.socket(family, socket.SOCK_DGRAM) as server,
        ):
            server.bind(("", 0))
            server.settimeout(traffic.LIMIT_SECONDS)
            client.sendto(b"question", (node_of(watched, version), server.getsockname()[1]))
            server.sendto(bytes(5000), server.recvfrom(64)[1])
            seen = watched.arrived()
            assert len(seen) == 4
            ends = ends_of(watched, version, node_of(watched, version))
            send(watched, ends, fragment(ends, PLANTED, LENGTH, number_of(seen[0], version)))
        return any(PLANTED in frame for frame in watched.arrived())

    watched.set_mode(Mode.ENFORCE)
    assert not plant()
    assert watched.moved() == {
        (Verdict.PASS, Reason.REPLY): 4,
        (Verdict.DROP, Reason.FRAGMENT): 1,
    }
    watched.set_mode(Mode.OFF)
    assert plant()


def node_of(watched: PodState, version: int) -> str:
    if not watched.pod.is_bridged:
        return traffic.NODE[version]
    return {4: "198.18.2.1", 6: "fd00:18:0:2::1"}[version]


def number_of(frame: bytes, version: int) -> int:
    """The identification of a fragment."""
    if version == 4:
        return int.from_bytes(frame[18:20], "big")
    return int.from_bytes(frame[IPV6_ID_OFFSET : IPV6_ID_OFFSET + 4], "big")
