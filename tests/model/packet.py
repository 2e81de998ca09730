"""How a frame is read, up to its transport header: part of the gate's specification (gate.py)."""

import dataclasses
from collections.abc import Mapping

from tests.model.facts import NOWHERE

ICMP, IGMP, TCP, UDP, DCCP, ICMPV6, SCTP, UDPLITE = 1, 2, 6, 17, 33, 58, 132, 136
WITH_PORTS = {TCP, UDP, DCCP, SCTP, UDPLITE}
HOP_OPTIONS, ROUTING, FRAGMENT, AUTHENTICATION, OPTIONS = 0, 43, 44, 51, 60
EXTENSIONS = {HOP_OPTIONS, ROUTING, FRAGMENT, AUTHENTICATION, OPTIONS}
NO_TRANSPORT = EXTENSIONS | {59, 135, 139, 140, 253, 254, 255}
"""Nothing, headers for hosts that move or have several addresses, and experiments."""
MAX_EXTENSIONS = 8

ETHERNET, SHORTEST = 14, 34
DHCP_SERVER, DHCP_CLIENT = 67, 68
FIN, SYN, RST, ACK = 1, 2, 4, 16
ERRORS = {4: {3, 11, 12}, 6: {1, 2, 3, 4}}
REDIRECT = {4: 5, 6: 137}
LINK_CONTROL = {130, 131, 132, 133, 134, 135, 136, 143}
ECHO_REQUEST, ECHO_REPLY = {4: 8, 6: 128}, {4: 0, 6: 129}
ANY_IPV4 = bytes(10) + b"\xff\xff" + bytes(4)


@dataclasses.dataclass(slots=True)
class Packet:
    """A frame that was read up to its transport header. family: 0 for ARP, which has nothing else;
    payload: from the transport header on; length: of it by the IP header, 0 if unknown;
    fragment: None, or its place in the datagram in bytes; identification: the datagram's; None if
    the frame ends before it.
    """

    family: int = 0
    source: bytes = NOWHERE
    destination: bytes = NOWHERE
    protocol: int = 0
    payload: bytes = b""
    length: int = 0
    fragment: int | None = None
    identification: int | None = 0

    @property
    def is_later_fragment(self) -> bool:
        return bool(self.fragment)

    @property
    def is_icmp(self) -> bool:
        return self.protocol == {4: ICMP, 6: ICMPV6}.get(self.family)

    @property
    def icmp_type(self) -> int | None:
        """None for a fragment, too."""
        is_read = self.is_icmp and self.fragment is None and self.payload
        return self.payload[0] if is_read else None

    @property
    def ports(self) -> tuple[int, int]:
        """Source and destination; 0 where there are none, and for a later fragment."""
        if self.protocol not in WITH_PORTS or self.is_later_fragment or len(self.payload) < 4:
            return 0, 0
        return number(self.payload, 0), number(self.payload, 2)

    @property
    def is_dhcp_answer(self) -> bool:
        is_udp = self.family == 4 and self.protocol == UDP
        return is_udp and self.ports == (DHCP_SERVER, DHCP_CLIENT)

    @property
    def flags(self) -> set[int]:
        """Of a TCP header, up to these."""
        return {flag for flag in (FIN, SYN, RST, ACK) if self.payload[13] & flag}

    @property
    def is_syn(self) -> bool:
        """Which opens a connection whatever other flags it has."""
        return self.flags & {SYN, ACK} == {SYN}

    def echo(self, wanted: Mapping[int, int]) -> int | None:
        """The identifier of an echo of the wanted type."""
        if len(self.payload) < 6 or self.payload[0] != wanted[self.family]:
            return None
        return number(self.payload, 4)


def number(data: bytes, at: int, size: int = 2) -> int:
    return int.from_bytes(data[at : at + size])


def syn_sequence(frame: bytes) -> bytes | None:
    """Of a SYN directly behind the IP header, whatever else that contains."""
    found = _syn(frame)
    return found[4:8] if found else None


def syn_ends(frame: bytes) -> tuple[bytes, int]:
    """Destination and port of one."""
    is_ipv4 = number(frame, 12) == 0x0800
    to = ANY_IPV4[:12] + frame[30:34] if is_ipv4 else frame[38:54]
    return to, number(_syn(frame), 2)


def _syn(frame: bytes) -> bytes:
    match number(frame, 12) if len(frame) >= SHORTEST else 0:
        case 0x0800 if frame[23] == TCP and number(frame, 20) % 0x2000 == 0:
            at = ETHERNET + frame[14] % 16 * 4
        case 0x86DD if len(frame) >= ETHERNET + 40 and frame[20] == TCP:
            at = ETHERNET + 40
        case _:
            return b""
    segment = frame[at:]
    is_syn = len(segment) >= 14 and segment[13] & (SYN | ACK) == SYN
    return segment if is_syn else b""


def parse(frame: bytes) -> Packet | None:
    """None: the frame does not show its transport header."""
    if len(frame) < SHORTEST:
        return None
    match number(frame, 12):
        case 0x0806:
            return Packet()
        case 0x0800:
            return parse_ipv4(frame[ETHERNET:])
        case 0x86DD:
            return parse_ipv6(frame[ETHERNET:])
    return None


def parse_ipv4(packet: bytes) -> Packet | None:
    version, words = divmod(packet[0], 16)
    header, total, place = words * 4, number(packet, 2), number(packet, 6) % 0x4000
    is_longer = total == 0  # than the field can express (BIG TCP)
    if version != 4 or header < 20 or (total < header and not is_longer):
        return None
    more, offset = divmod(place, 0x2000)
    return Packet(
        family=4,
        source=ANY_IPV4[:12] + packet[12:16],
        destination=ANY_IPV4[:12] + packet[16:20],
        protocol=packet[9],
        payload=packet[header:],
        length=0 if is_longer else total - header,
        fragment=offset * 8 if more or offset else None,
        identification=number(packet, 4),
    )


def parse_ipv6(packet: bytes) -> Packet | None:
    """Up to eight extension headers, and then a fragment header, behind which none may follow."""
    if len(packet) < 40 or packet[0] // 16 != 6:
        return None
    found = Packet(6, packet[8:24], packet[24:40])
    protocol, at, count = packet[6], 40, 0
    while protocol in EXTENSIONS and found.fragment is None:
        header = packet[at : at + 8]
        is_last = protocol == FRAGMENT
        if len(header) < 4 or (count == MAX_EXTENSIONS and not is_last):
            return None
        if protocol == ROUTING and header[3]:  # this is not the last destination
            return None
        if protocol == FRAGMENT:
            found.fragment, size = number(header, 2) // 8 * 8, 8
            found.identification = number(header, 4, 4) if len(header) == size else None
        elif protocol == AUTHENTICATION:
            size = (header[1] + 2) * 4
        else:
            size = (header[1] + 1) * 8
        protocol, at, count = header[0], at + size, count + 1
    length = number(packet, 4)
    is_longer = length == 0
    if protocol in NO_TRANSPORT or (length < at - 40 and not is_longer):
        return None
    found.protocol, found.payload = protocol, packet[at:]
    found.length = 0 if is_longer else length - (at - 40)
    return found
