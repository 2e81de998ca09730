"""A frame for a pod, encapsulated in VXLAN for a tunnel of the host (RFC 7348)."""

import struct

from tests.kernel import frames

VXLAN_PORT = 4789
NETWORK = 42

# Of the tunnel's own interface, to which the wrapped frame goes.
MAC = bytes.fromhex("020000000042")


def wrap(inner: bytes) -> bytes:
    """The payload of the UDP datagram."""
    return struct.pack("!II", 0x08000000, NETWORK << 8) + inner


def udp(ends: frames.Ends, inner: bytes) -> bytes:
    """The UDP datagram itself, with a checksum: over IPv6 a tunnel takes none without."""
    plain = frames.udp(ends, wrap(inner))
    addresses = ends.source.packed + ends.pod.packed
    pseudo = addresses + struct.pack("!IHBB", len(plain), 0, 0, frames.UDP)
    return plain[:6] + struct.pack("!H", frames.checksum(pseudo + plain)) + plain[8:]
