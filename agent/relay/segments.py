"""Opening TCP segments as the packet socket shows them, and what goes back for them."""

import dataclasses
import socket
import struct

# RFC 9293, 3.1
_TCP = struct.Struct("!HHIIBBHHH")
_SYN, _RST, _ACK = 0x02, 0x04, 0x10
_PORTS = struct.Struct("!HHI")
_CHECKSUM_OFFSET = 16
_NO_OPTIONS = 5 << 4

_IPV4_SHORTEST = 20
_IPV6_LENGTH = 40
_TTL = 64

# Classic BPF over what a SOCK_DGRAM packet socket gives, so from the IP header on: TCP with SYN and
# without ACK. IPv6 with extension headers is not the kubelet's. Each line is code, jump if true,
# jump if false, operand (linux/filter.h).
SYN_FILTER = (
    (0x30, 0, 0, 0),  # A = version
    (0x54, 0, 0, 0xF0),
    (0x15, 7, 0, 0x60),
    (0x15, 0, 13, 0x40),
    (0x30, 0, 0, 9),  # A = IPv4's protocol
    (0x15, 0, 11, socket.IPPROTO_TCP),
    (0x28, 0, 0, 6),  # A = fragment field
    (0x45, 9, 0, 0x1FFF),
    (0xB1, 0, 0, 0),  # X = length of the header
    (0x05, 0, 0, 3),
    (0x30, 0, 0, 6),  # A = IPv6's next header
    (0x15, 0, 5, socket.IPPROTO_TCP),
    (0x01, 0, 0, _IPV6_LENGTH),  # X = length of the header
    (0x50, 0, 0, 13),  # A = TCP flags
    (0x54, 0, 0, _SYN | _ACK),
    (0x15, 0, 1, _SYN),
    (0x06, 0, 0, 0xFFFF),
    (0x06, 0, 0, 0),
)

Flow = tuple[bytes, int, bytes, int]
"""The node's address and port, the relay's address and the port; addresses packed."""

# For SO_LINGER (socket(7)): close says RST instead of FIN.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """One SYN. Addresses are packed: 4 or 16 bytes. packet: from the IP header on, complete."""

    peer: bytes
    peer_port: int
    local: bytes
    port: int
    sequence: int
    packet: bytes

    @property
    def flow(self) -> Flow:
        return self.peer, self.peer_port, self.local, self.port


def read_opening(packet: bytes) -> Opening | None:
    """None for what is no whole opening segment.

    The sender leaves the TCP checksum to the interface, which a pair of veths has none of: what
    goes in again elsewhere must carry a right one, so it is computed here.
    """
    try:
        if packet[0] >> 4 == 4:
            start = (packet[0] & 0x0F) * 4
            peer, local = packet[12:16], packet[16:20]
            end = packet[2] << 8 | packet[3]
            if start < _IPV4_SHORTEST or packet[9] != socket.IPPROTO_TCP:
                return None
        else:
            start = _IPV6_LENGTH
            peer, local = packet[8:24], packet[24:40]
            end = start + (packet[4] << 8 | packet[5])
            if packet[6] != socket.IPPROTO_TCP:
                return None
        if end > len(packet) or end - start < _TCP.size:
            return None
        peer_port, port, sequence = _PORTS.unpack_from(packet, start)
        if packet[start + 13] & (_SYN | _ACK) != _SYN:
            return None
    except (IndexError, struct.error):
        return None
    segment = bytearray(packet[start:end])
    segment[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + 2] = b"\0\0"
    checksum = tcp_checksum(peer, local, segment)
    segment[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + 2] = checksum.to_bytes(2, "big")
    return Opening(peer, peer_port, local, port, sequence, packet[:start] + segment)


def refusal(opening: Opening) -> bytes:
    """What the kernel sends for a port on which nobody listens: RST and ACK (RFC 9293, 3.5.2).

    From the IP header on; the kernel fills in IPv4's length, identification and checksum.
    """
    segment = bytearray(
        _TCP.pack(
            opening.port,
            opening.peer_port,
            0,
            opening.sequence + 1 & 0xFFFFFFFF,
            _NO_OPTIONS,
            _RST | _ACK,
            0,
            0,
            0,
        )
    )
    checksum = tcp_checksum(opening.local, opening.peer, segment)
    segment[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + 2] = checksum.to_bytes(2, "big")
    addresses = opening.local + opening.peer
    if len(opening.peer) == 4:
        header = struct.pack("!BxHxxxxBBxx", 0x45, 0, _TTL, socket.IPPROTO_TCP)
    else:
        header = struct.pack("!IHBB", 6 << 28, len(segment), socket.IPPROTO_TCP, _TTL)
    return header + addresses + segment


def tcp_checksum(source: bytes, destination: bytes, segment: bytes | bytearray) -> int:
    """RFC 9293, 3.1, over the pseudo header of the addresses' family."""
    whole = source + destination + segment
    if len(whole) % 2:
        whole += b"\0"
    total: int = (
        sum(struct.unpack(f"!{len(whole) // 2}H", whole)) + socket.IPPROTO_TCP + len(segment)
    )
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
