"""A process writes packets header by header, in the name of a peer of the pod."""

import dataclasses
import functools
import socket
import struct
from collections.abc import Callable

from tests.attacks.site import Shows, Site, attacker, contains
from tests.attacks.trick import Attack, Trick, with_raw_sockets
from tests.kernel import frames, links, syns, traffic

_GRE, _IPIP = 47, 4
_ROUTER_ADVERTISEMENT, _SOLICITATION, _ADVERTISEMENT = 134, 135, 136
_PACKET_VNET_HDR, _SOL_PACKET = 15, 263
_BEHIND = {4: "198.18.77.1", 6: "fd00:18:77::1"}

Build = Callable[[frames.Ends], tuple[int, bytes]]


@dataclasses.dataclass(frozen=True, slots=True)
class Forgery:
    """A packet in the name of a peer of the pod: its protocol and the bytes behind IP's header."""

    name: str
    build: Build
    versions: tuple[int, ...] = (4, 6)
    requests_first: int = 0
    """The protocol of a packet without ports that the pod sends to the peer before."""


def _control(type_: int, code: int = 0) -> Build:
    def build(ends: frames.Ends) -> tuple[int, bytes]:
        protocol = frames.ICMP if ends.family == 4 else frames.ICMPV6
        return protocol, frames.icmp(ends, type_, code)

    return build


FORGERIES = (
    Forgery("rst", lambda ends: (frames.TCP, frames.tcp(ends, frames.RST, sequence=7))),
    Forgery("bare-ack", lambda ends: (frames.TCP, frames.tcp(ends, frames.ACK, sequence=8))),
    Forgery("unreachable", _control(3, 1), (4,)),
    Forgery("too-big", _control(3, 4), (4,)),
    Forgery("unreachable6", _control(1), (6,)),
    Forgery("too-big6", _control(2), (6,)),
    Forgery("router-advertisement", _control(_ROUTER_ADVERTISEMENT), (6,)),
    Forgery("solicitation", _control(_SOLICITATION), (6,)),
    Forgery("advertisement", _control(_ADVERTISEMENT), (6,)),
    Forgery("membership", lambda _: (frames.IGMP, bytes((0x11, 0, 0xEE, 0xFF)) + bytes(4)), (4,)),
    Forgery("gre", lambda _: (_GRE, bytes(4) + b"forged"), requests_first=_GRE),
    Forgery("esp", lambda _: (frames.ESP, bytes(8) + b"forged"), requests_first=frames.ESP),
    Forgery("ipip", lambda _: (_IPIP, b"forged" * 4), requests_first=_IPIP),
)
_TO_CLIENTS_BEHIND = FORGERIES[:6]


def by_raw_socket(site: Site, ends: frames.Ends, packet: bytes) -> None:
    """An IP packet, its header included."""
    syns.send_whole(syns.Target(str(ends.pod), site.interface, site.port, site.port), packet)


def by_packet_socket(site: Site, ends: frames.Ends, packet: bytes) -> None:
    """The same at the pod's own interface."""
    ethertype = frames.ETHERTYPE_IPV4 if ends.family == 4 else frames.ETHERTYPE_IPV6
    with links.packet_socket(site.pod.interface) as sock, links.drop_is_enobufs():
        sock.send(frames.ethernet(ends, ethertype, packet))


Send = Callable[[Site, frames.Ends, bytes], None]
SENDS: dict[str, Send] = {"raw": by_raw_socket, "packet": by_packet_socket}


def from_neighbour(site: Site, version: int) -> frames.Ends:
    """To the attack's port, in the name of the other pod."""
    return site.ends(version, traffic.address(site.neighbour, version))


def forge(attack: Attack, forgery: Forgery, send: Send) -> Shows:
    ends = from_neighbour(attack.site, attack.version)
    protocol, transport = forgery.build(ends)
    # Neighbour discovery needs a hop limit of 255.
    packet = (
        frames.ipv4(ends, protocol, transport)
        if attack.version == 4
        else frames.ipv6(ends, protocol, transport, hop_limit=255)
    )
    if forgery.requests_first:
        _send_first(attack.site, ends, forgery.requests_first)
    with attacker(attack.rights):
        send(attack.site, ends, packet)
    return contains(transport)


def forge_to_client_behind(attack: Attack, forgery: Forgery, send: Send) -> Shows:
    """To an address for which the pod routes."""
    site, behind = attack.site, _BEHIND[attack.version]
    own = site.address(attack.version)
    onlink = "" if site.pod.is_bridged else " onlink"
    links.ip(f"route replace {behind} via {own} dev {site.interface}{onlink}")
    ends = from_neighbour(site, attack.version)
    ends = dataclasses.replace(ends, pod=frames.address(behind))
    protocol, transport = forgery.build(ends)
    with attacker(attack.rights):
        send(site, ends, syns.packet(ends, protocol, transport))
    return contains(transport)


def _send_first(site: Site, ends: frames.Ends, protocol: int) -> None:
    family = traffic.family(ends.family)
    with site.pod.open_socket(family, socket.SOCK_RAW, protocol) as sock:
        sock.sendto(bytes(8), (str(ends.source), 0))


def forge_arp(attack: Attack) -> Shows:
    ends = from_neighbour(attack.site, 4)
    frame = frames.arp(ends, operation=2)
    with attacker(attack.rights), links.packet_socket(attack.site.pod.interface) as sock:
        sock.send(frame)
    return contains(frame[14:42])


def offload(attack: Attack) -> Shows:
    """Its IP header states that the segment is empty; the kernel corrects that behind the gate."""
    version = attack.version
    ends = from_neighbour(attack.site, version)
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
    with attacker(attack.rights), links.packet_socket(attack.site.pod.interface) as sock:
        sock.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        sock.send(header + frame)
    return contains(b"injected")


TRICKS = (
    *(
        Trick(
            f"{way}-{forgery.name}",
            "speaks for a peer of the pod",
            functools.partial(forge, forgery=forgery, send=send),
            with_raw_sockets(*forgery.versions),
        )
        for forgery in FORGERIES
        for way, send in SENDS.items()
    ),
    *(
        Trick(
            f"{way}-{forgery.name}-behind",
            "speaks for a peer of a client behind the pod",
            functools.partial(forge_to_client_behind, forgery=forgery, send=send),
            with_raw_sockets(*forgery.versions),
        )
        for forgery in _TO_CLIENTS_BEHIND
        for way, send in SENDS.items()
    ),
    Trick("packet-arp", "speaks for a peer of the pod", forge_arp, with_raw_sockets(4)),
    Trick("packet-offload", "hides data from the gate", offload, with_raw_sockets()),
)
