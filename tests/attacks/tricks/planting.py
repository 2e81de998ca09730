"""A later fragment has no transport header. A process sends one in another's name, to put its bytes
into a datagram that the pod is about to receive."""

import functools
import itertools
import socket

from agent.lab.lab import LabPod
from tests.attacks.site import Shows, attacker, contains
from tests.attacks.topologies import BRIDGED, WITHOUT_PODS
from tests.attacks.trick import Attack, Trick, unless, with_raw_sockets
from tests.attacks.tricks.forging import SENDS, Send, from_neighbour
from tests.kernel import frames, links, syns, traffic

_PLANTED = b"planted!" * 2
_LENGTH = 1024
_IPV6_ID_OFFSET = 14 + 40 + 4
_TRACKING = "chain c { type filter hook forward priority 0; ct state invalid counter; }"
_numbers = itertools.count(7)


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


def in_datagram_of_a_pod(attack: Attack, send: Send) -> Shows:
    site, version, number = attack.site, attack.version, next(_numbers)
    ends = from_neighbour(site, version)
    beginning = frames.udp(ends, bytes(_LENGTH - 8 + len(_PLANTED)))[:_LENGTH]
    to = site.address(version)
    send_from(site.neighbour, version, to, fragment(ends, beginning, 0, number))
    with attacker(attack.rights):
        send(site, ends, fragment(ends, _PLANTED, _LENGTH, number))
    return contains(_PLANTED)


def in_answer_of_the_node(attack: Attack, send: Send) -> Shows:
    site, version = attack.site, attack.version
    family, node = traffic.family(version), traffic.gateway(site.pod, version)
    with (
        site.pod.open_socket(family, socket.SOCK_DGRAM) as client,
        socket.socket(family, socket.SOCK_DGRAM) as server,
    ):
        server.bind(("", 0))
        server.settimeout(traffic.LIMIT_SECONDS)
        client.sendto(b"question", (node, server.getsockname()[1]))
        server.sendto(bytes(5000), server.recvfrom(64)[1])
        answer = [frame for frame in site.arrived() if len(frame) > _LENGTH]
        ends = site.ends(version, node)
        with attacker(attack.rights):
            send(site, ends, fragment(ends, _PLANTED, _LENGTH, _number_of(answer[0], version)))
    return contains(_PLANTED)


def _number_of(frame: bytes, version: int) -> int:
    """The identification of a fragment."""
    if version == 4:
        return int.from_bytes(frame[18:20], "big")
    return int.from_bytes(frame[_IPV6_ID_OFFSET : _IPV6_ID_OFFSET + 4], "big")


def on_the_way(attack: Attack) -> Shows:
    """Connection tracking puts fragments together whatever they came in by."""
    site, version, number = attack.site, attack.version, next(_numbers)
    ends = from_neighbour(site, version)
    whole = frames.udp(ends, bytes(_LENGTH - 8) + _PLANTED)
    to = site.address(version)
    ethertype = frames.ETHERTYPE_IPV4 if version == 4 else frames.ETHERTYPE_IPV6
    with links.table("inet", _TRACKING):
        send_from(site.neighbour, version, to, fragment(ends, whole[:_LENGTH], 0, number))
        with attacker(attack.rights):
            to_way = site.ends(version, str(ends.source), attack.by().mac)
            planted = fragment(ends, _PLANTED, _LENGTH, number)
            attack.by().send(frames.ethernet(to_way, ethertype, planted))
    return contains(_PLANTED)


TRICKS = (
    *(
        Trick(
            f"{way}-plant-{name}",
            "puts bytes into a datagram of another",
            functools.partial(attempt, send=send),
            with_raw_sockets(),
        )
        for name, attempt in (
            ("in-datagram", in_datagram_of_a_pod),
            ("in-answer", in_answer_of_the_node),
        )
        for way, send in SENDS.items()
    ),
    Trick(
        *("frame-plant", "puts bytes into a datagram of another pod, where the node tracks"),
        *(on_the_way, with_raw_sockets()),
        needs_way=True,
        gaps=(
            unless(
                "fragments between pods of one bridge meet no connection tracking",
                topologies=(BRIDGED, WITHOUT_PODS),
                ways=("loopback", "pair", "macvlan", "flood"),
            ),
        ),
    ),
)
