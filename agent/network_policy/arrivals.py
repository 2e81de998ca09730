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

_ETHERTYPES = {4: 0x0800, 6: 0x86DD}
_SOURCE_OFFSETS = {4: 12, 6: 8}
_PROTOCOL_OFFSETS = {4: 9, 6: 6}
_PROTOCOLS = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP}
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_PORTS = struct.Struct("!HH")
_HEAD_BYTES = 128


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
        self._arrived: set[Sent] = set()
        self._sending: list[socket.socket] = []
        self._capture = destination_netns.socket(
            socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETHERTYPES[self._source.version])
        )
        try:
            packets.attach_filter(self._capture, _from_source(self._source))
        except BaseException:
            self.close()
            raise

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
        address = str(self._destination), flow.port
        # On its way; answered at once; or rejected on the source's side, so it will not arrive.
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError, PermissionError):
            if is_stream:
                sending.connect(address)
            else:
                sending.sendto(b"", address)
        return sent

    def has(self, sent: Sent) -> bool:
        """Whether a packet has arrived. Never waits."""
        with contextlib.suppress(BlockingIOError):
            while True:
                if found := self._read(self._capture.recv(_HEAD_BYTES)):
                    self._arrived.add(found)
        return sent in self._arrived

    def close(self) -> None:
        """End all that was sent; connections are ended by it, too."""
        self._capture.close()
        for sending in self._sending:
            sending.close()

    def _read(self, packet: bytes) -> Sent | None:
        """`packet`: from its IP header on, without extension headers, as the kernel sends it."""
        if not packet:
            return None
        version = packet[0] >> 4
        start = (packet[0] & 0xF) * 4 if version == 4 else packets.IPV6_BYTES
        if len(packet) < start + _PORTS.size:
            return None
        return Sent(packet[_PROTOCOL_OFFSETS[version]], _PORTS.unpack_from(packet, start))


def _from_source(address: IPAddress) -> list[packets.Instruction]:
    """A filter for packets from this address: each of its words, compared."""
    words = [word for (word,) in struct.iter_unpack("!I", address.packed)]
    program: list[packets.Instruction] = []
    for index, word in enumerate(words):
        to_the_drop = 2 * (len(words) - index) - 1
        program.append((_LOAD_WORD, 0, 0, _SOURCE_OFFSETS[address.version] + 4 * index))
        program.append((_JUMP_IF_EQUAL, 0, to_the_drop, word))
    return [*program, (_RETURN, 0, 0, 0xFFFF), (_RETURN, 0, 0, 0)]
