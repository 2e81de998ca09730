"""Ethernet frames built by hand, with valid checksums, so that a real stack accepts them."""

import dataclasses
import ipaddress
import struct

from bpf.abi import IPAddress

FIN, SYN, RST, PSH, ACK, URG, ECE, CWR = (1 << bit for bit in range(8))

ETHERTYPE_IPV4 = 0x0800
ETHERTYPE_ARP = 0x0806
ETHERTYPE_VLAN = 0x8100
ETHERTYPE_IPV6 = 0x86DD
ETHERTYPE_SERVICE_VLAN = 0x88A8

HOPOPTS, ICMP, IGMP, TCP, UDP, ROUTING, FRAGMENT = 0, 1, 2, 6, 17, 43, 44
ESP, AH, ICMPV6, NO_NEXT, DSTOPTS = 50, 51, 58, 59, 60

MORE_FRAGMENTS = 0x2000

# A source that no interface has, by which sniffers recognise injected frames.
INJECTOR_MAC = bytes.fromhex("020000000bad")


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """Source and destination, in one family, and the pod's interface."""

    source: IPAddress
    pod: IPAddress
    pod_mac: bytes = bytes.fromhex("0200000000aa")
    source_port: int = 20000
    port: int = 80

    @property
    def family(self) -> int:
        return self.pod.version


def address(text: str) -> IPAddress:
    return ipaddress.ip_address(text)


def checksum(data: bytes) -> int:
    """RFC 1071."""
    if len(data) % 2:
        data += b"\0"
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ethernet(ends: Ends, ethertype: int, payload: bytes, *, tags: tuple[int, ...] = ()) -> bytes:
    """A frame; `tags` are ethertypes of VLAN tags with VID 0, outermost first."""
    tagged = b"".join(struct.pack("!HH", tag, 0) for tag in tags)
    return ends.pod_mac + INJECTOR_MAC + tagged + struct.pack("!H", ethertype) + payload


def ipv4(
    ends: Ends,
    protocol: int,
    payload: bytes,
    *,
    destination: IPAddress | None = None,
    options: bytes = b"",
    fragment: int = 0,
    total_length: int | None = None,
    version: int = 4,
    header_words: int | None = None,
) -> bytes:
    """An IPv4 packet. fragment: flags and offset, the 16 bits as they are."""
    words = 5 + len(options) // 4 if header_words is None else header_words
    length = 20 + len(options) + len(payload) if total_length is None else total_length
    header = struct.pack(
        "!BBHHHBBH4s4s",
        version << 4 | words,
        0,
        length,
        ends.source_port,
        fragment,
        64,
        protocol,
        0,
        ends.source.packed,
        (destination or ends.pod).packed,
    )
    header += options
    return header[:10] + struct.pack("!H", checksum(header)) + header[12:] + payload


def ipv6(
    ends: Ends,
    next_header: int,
    payload: bytes,
    *,
    destination: IPAddress | None = None,
    payload_length: int | None = None,
    version: int = 6,
    hop_limit: int = 64,
) -> bytes:
    length = len(payload) if payload_length is None else payload_length
    addresses = ends.source.packed + (destination or ends.pod).packed
    return struct.pack("!IHBB", version << 28, length, next_header, hop_limit) + addresses + payload


def extension(next_header: int, *, words: int = 0) -> bytes:
    """A destination or hop-by-hop options header of 8 * (words + 1) bytes, all padding."""
    padding = words * 8 + 4
    return bytes((next_header, words, 1, padding)) + bytes(padding)


def routing(next_header: int, segments_left: int) -> bytes:
    return bytes((next_header, 0, 0, segments_left, 0, 0, 0, 0))


def fragment_header(
    next_header: int, offset_bytes: int, *, more: bool, identification: int
) -> bytes:
    return struct.pack("!BBHI", next_header, 0, offset_bytes | more, identification)


def authentication(next_header: int) -> bytes:
    return struct.pack("!BBHII", next_header, 4, 0, 0x1234, 1) + bytes(12)


def chain(headers: int, last: int, payload: bytes) -> bytes:
    """`headers` destination options headers before `payload`, which is of protocol `last`."""
    for number in range(headers):
        payload = extension(last if number == 0 else DSTOPTS) + payload
    return payload


def _transport_checksum(ends: Ends, protocol: int, segment: bytes) -> int:
    addresses = ends.source.packed + ends.pod.packed
    pseudo = addresses + struct.pack("!IHBB", len(segment), 0, 0, protocol)
    return checksum(pseudo + segment)


def tcp(
    ends: Ends,
    flags: int,
    *,
    data: bytes = b"",
    options: bytes = b"",
    sequence: int = 1000,
    acknowledged: int = 0,
    header_words: int | None = None,
) -> bytes:
    words = 5 + len(options) // 4 if header_words is None else header_words
    header = struct.pack(
        "!HHIIBBHHH",
        ends.source_port,
        ends.port,
        sequence,
        acknowledged,
        words << 4,
        flags,
        64240,
        0,
        0,
    )
    segment = header + options + data
    value = struct.pack("!H", _transport_checksum(ends, TCP, segment))
    return segment[:16] + value + segment[18:]


def udp(ends: Ends, data: bytes = b"hello", *, has_checksum: bool = False) -> bytes:
    """Without a checksum a receiver over IPv6 drops it; programs do not check it."""
    message = struct.pack("!HHHH", ends.source_port, ends.port, 8 + len(data), 0) + data
    value = _transport_checksum(ends, UDP, message) if has_checksum else 0
    return message[:6] + struct.pack("!H", value) + message[8:]


def icmp(ends: Ends, type_: int, code: int = 0, *, body: bytes = bytes(36)) -> bytes:
    """An ICMP or ICMPv6 message of the family; by default an error that quotes nothing."""
    message = struct.pack("!BBH", type_, code, 0) + body
    is_ipv4 = ends.family == 4
    value = checksum(message) if is_ipv4 else _transport_checksum(ends, ICMPV6, message)
    return message[:2] + struct.pack("!H", value) + message[4:]


def packet(ends: Ends, protocol: int, payload: bytes, *, tags: tuple[int, ...] = ()) -> bytes:
    """A whole plain frame in the family of `ends`."""
    if ends.family == 4:
        return ethernet(ends, ETHERTYPE_IPV4, ipv4(ends, protocol, payload), tags=tags)
    return ethernet(ends, ETHERTYPE_IPV6, ipv6(ends, protocol, payload), tags=tags)


def segment(ends: Ends, flags: int, **details: bytes | int) -> bytes:
    """A whole plain frame with a TCP segment; details as for `tcp`."""
    return packet(ends, TCP, tcp(ends, flags, **details))  # type: ignore[arg-type]


def arp(ends: Ends, operation: int = 1) -> bytes:
    body = struct.pack("!HHBBH", 1, ETHERTYPE_IPV4, 6, 4, operation) + bytes(20)
    return ethernet(ends, ETHERTYPE_ARP, body)
