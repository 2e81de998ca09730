"""A frame for a pod, encapsulated in VXLAN for a tunnel of the host (RFC 7348), and its sender."""

import contextlib
import os
import struct
from collections.abc import Callable, Iterator

from tests.kernel import frames, guarded, links, syns, wire
from tests.kernel.guarded import PodState

VXLAN_PORT = 4789
_NOBODY = 65534
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


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """As the user nobody, without any capability."""
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def code_of(call: Callable[[], object]) -> int:
    """The errno; 0 for a call that succeeds."""
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


def end_by_loopback(watched: PodState) -> Callable[[bytes], None]:
    """As long a way as a tunnel's: it comes in by the loopback and is routed to the pod."""
    pod, node = frames.address(watched.pod.ipv4), frames.address(syns.STRANGER[4])
    ends = frames.Ends(node, pod, bytes(6), 31000, guarded.END_PORT)

    def send(end: bytes) -> None:
        with links.packet_socket("lo") as sock:
            wire.send(sock, frames.packet(ends, frames.UDP, frames.udp(ends, end)))

    return send
