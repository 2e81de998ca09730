"""Whether a packet of one pod arrives at another.

An answer cannot show that: an engine's REJECT and a closed port look the same. A packet socket in
the destination's namespace sees the packet when its interface receives it (packet(7)), so no
listener is needed, and a pod's own rules have not yet seen it. Engines that filter on the node's
side of the pod's interface are seen; one that filters inside the pod's namespace is not.
"""

import contextlib
import socket
import struct

import msgspec

from agent.linux import packets
from agent.network_policy.checks import Flow
from bpf.abi import IPAddress
from probes.netns import Netns

_PROTOCOL_OFFSETS = {4: 9, 6: 6}
_PROTOCOLS = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP}
_PORTS = struct.Struct("!HH")
_HEAD_BYTES = 128
# A pod may send to the witness what it likes, and faster than it is read.
_READS_MAX = 64


class Sent(msgspec.Struct, frozen=True, gc=False):
    """A packet on its way. ports: of source and destination."""

    protocol: int
    ports: tuple[int, int]


class Arrivals:
    """Sends packets from one namespace to another: a TCP connection's SYN, or an empty datagram.

    TCP sends its SYN again after a second and so on (RFC 6298), until `close`. Closing waits for
    RCU: do it in a thread. Raises NetnsGoneError and OSError.
    """

    def __init__(
        self, source: tuple[Netns, IPAddress], destination: tuple[Netns, IPAddress]
    ) -> None:
        """source, destination: with addresses of one family."""
        self._source_netns, self._source = source
        destination_netns, self._destination = destination
        self._awaited: set[Sent] = set()
        self._arrived: set[Sent] = set()
        self._sending: list[socket.socket] = []
        self._capture = packets.open_capture_of(destination_netns, self._source)

    def fileno(self) -> int:
        """Readable when a packet from the source has arrived; `has` shows whether it is the one."""
        return self._capture.fileno()

    def send(self, flow: Flow) -> Sent:
        """Send a packet to this port."""
        is_stream = flow.protocol == "TCP"
        sending = self._source_netns.socket(
            socket.AF_INET if self._source.version == 4 else socket.AF_INET6,
            socket.SOCK_STREAM if is_stream else socket.SOCK_DGRAM,
        )
        self._sending.append(sending)
        # So that the packet is the one awaited.
        sending.bind((str(self._source), 0))
        sent = Sent(_PROTOCOLS[flow.protocol], (sending.getsockname()[1], flow.port))
        self._awaited.add(sent)
        address = str(self._destination), flow.port
        # On its way; answered at once; or rejected on the source's side, so it will not arrive.
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError, PermissionError):
            if is_stream:
                sending.connect(address)
            else:
                sending.sendto(b"", address)
        return sent

    def has(self, sent: Sent) -> bool:
        """Whether a packet has arrived, of the next ones that were received. Never waits."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS_MAX):
                found = _read(self._capture.recv(_HEAD_BYTES))
                if found in self._awaited:
                    self._arrived.add(found)
        return sent in self._arrived

    def close(self) -> None:
        """End all that was sent; connections are ended by it, too."""
        self._capture.close()
        for sending in self._sending:
            sending.close()


def _read(packet: bytes) -> Sent | None:
    """`packet`: from its IP header on, without extension headers, as the kernel sends it."""
    if not packet:
        return None
    version = packet[0] >> 4
    start = (packet[0] & 0xF) * 4 if version == 4 else packets.IPV6_BYTES
    if len(packet) < start + _PORTS.size:
        return None
    return Sent(packet[_PROTOCOL_OFFSETS[version]], _PORTS.unpack_from(packet, start))
