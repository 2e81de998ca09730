"""SYNs as the packet socket receives them, and the reset that rejects one."""

import dataclasses
import socket
import struct

from agent.linux import packets
from agent.linux.packets import ACK, IPV4_BYTES, IPV6_BYTES, RST, SYN

_PORTS_AND_SEQUENCE = struct.Struct("!HHI")

# Classic BPF over what a SOCK_DGRAM packet socket receives, so from the IP header on: TCP with SYN
# and without ACK. The kubelet sends no IPv6 extension headers.
SYN_FILTER: tuple[packets.Instruction, ...] = (
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
    (0x01, 0, 0, IPV6_BYTES),  # X = length of the header
    (0x50, 0, 0, 13),  # A = TCP flags
    (0x54, 0, 0, SYN | ACK),
    (0x15, 0, 1, SYN),
    (0x06, 0, 0, 0xFFFF),
    (0x06, 0, 0, 0),
)

Flow = tuple[bytes, int, bytes, int]
"""Address and port of the kubelet's end, address and port of the relay's end; addresses packed."""

# For SO_LINGER (socket(7)): close sends RST instead of FIN.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclasses.dataclass(slots=True)
class Syn:
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


def parse_syn(packet: bytes) -> Syn | None:
    """None for a packet that is not a complete SYN.

    The kernel leaves the TCP checksum to the interface, and a veth does not compute it. The packet
    is injected elsewhere, where the checksum must be correct, so it is computed here.
    """
    try:
        if packet[0] >> 4 == 4:
            start = (packet[0] & 0x0F) * 4
            peer, local = packet[12:16], packet[16:20]
            end = packet[2] << 8 | packet[3]
            if start < IPV4_BYTES or packet[9] != socket.IPPROTO_TCP:
                return None
        else:
            start = IPV6_BYTES
            peer, local = packet[8:24], packet[24:40]
            end = start + (packet[4] << 8 | packet[5])
            if packet[6] != socket.IPPROTO_TCP:
                return None
        if end > len(packet) or end - start < packets.TCP_HEADER.size:
            return None
        peer_port, port, sequence = _PORTS_AND_SEQUENCE.unpack_from(packet, start)
        if packet[start + 13] & (SYN | ACK) != SYN:
            return None
    except (IndexError, struct.error):
        return None
    segment = packets.with_tcp_checksum(peer, local, packet[start:end])
    return Syn(peer, peer_port, local, port, sequence, packet[:start] + segment)


def reset_for(syn: Syn) -> bytes:
    """RST and ACK, as the kernel sends for a port without a listener (RFC 9293, 3.5.2)."""
    return packets.tcp_packet(
        syn.local,
        syn.peer,
        ports=(syn.port, syn.peer_port),
        flags=RST | ACK,
        sequence=0,
        acknowledgement=syn.sequence + 1 & 0xFFFFFFFF,
        window=0,
    )
