"""Whether a packet of one pod arrives at another.

An answer cannot show that: an engine's REJECT and a closed port look the same. A packet socket in
the destination's namespace sees the packet when its interface receives it (packet(7)), so no
listener is needed, and a pod's own rules have not yet seen it. Engines that filter on the node's
side of the pod's interface are seen; one that filters inside the pod's namespace is not.
"""

import socket
import struct

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


class Attempt:
    """One packet on its way, a TCP connection's SYN or an empty datagram.

    TCP sends its SYN again after a second and so on (RFC 6298), until `close`. Closing waits for
    RCU: do it in a thread. Raises NetnsGoneError and OSError.
    """

    def __init__(
        self,
        flow: Flow,
        source: tuple[Netns, IPAddress],
        destination: tuple[Netns, IPAddress],
    ) -> None:
        (source_netns, self._source), (destination_netns, address) = source, destination
        self._protocol = _PROTOCOLS[flow.protocol]
        version = address.version
        self._capture = destination_netns.socket(
            socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETHERTYPES[version])
        )
        self._sending: socket.socket | None = None
        try:
            packets.attach_filter(self._capture, _from_source(self._source))
            self._sending = source_netns.socket(
                socket.AF_INET if version == 4 else socket.AF_INET6,
                socket.SOCK_STREAM if flow.protocol == "TCP" else socket.SOCK_DGRAM,
            )
            # So that the packet is the one awaited.
            self._sending.bind((str(self._source), 0))
            self._ports = (self._sending.getsockname()[1], flow.port)
            self._send((str(address), flow.port))
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when a packet from the source has arrived; `has_arrived` shows whether it is
        this one."""
        return self._capture.fileno()

    def has_arrived(self) -> bool:
        """Whether the packet is among those received since the last call. Never waits."""
        while True:
            try:
                packet = self._capture.recv(_HEAD_BYTES)
            except BlockingIOError:
                return False
            if self._is_awaited(packet):
                return True

    def close(self) -> None:
        """End the attempt; a connection is ended by it, too."""
        self._capture.close()
        if self._sending is not None:
            self._sending.close()

    def _send(self, address: tuple[str, int]) -> None:
        assert self._sending is not None
        try:
            if self._protocol == socket.IPPROTO_TCP:
                self._sending.connect(address)
            else:
                self._sending.sendto(b"", address)
        except (BlockingIOError, ConnectionRefusedError, PermissionError):
            # On its way; answered at once; or rejected on the source's side, so it will not arrive.
            pass

    def _is_awaited(self, packet: bytes) -> bool:
        """`packet`: from its IP header on, without extension headers, as the kernel sends it."""
        if not packet:
            return False
        version = packet[0] >> 4
        start = (packet[0] & 0xF) * 4 if version == 4 else packets.IPV6_BYTES
        source = _SOURCE_OFFSETS[version]
        packed = self._source.packed
        return (
            len(packet) >= start + _PORTS.size
            and packet[source : source + len(packed)] == packed
            and packet[_PROTOCOL_OFFSETS[version]] == self._protocol
            and _PORTS.unpack_from(packet, start) == self._ports
        )


def _from_source(address: IPAddress) -> list[packets.Instruction]:
    """A filter for packets from this address: each of its words, compared."""
    words = [word for (word,) in struct.iter_unpack("!I", address.packed)]
    program: list[packets.Instruction] = []
    for index, word in enumerate(words):
        to_the_drop = 2 * (len(words) - index) - 1
        program.append((_LOAD_WORD, 0, 0, _SOURCE_OFFSETS[address.version] + 4 * index))
        program.append((_JUMP_IF_EQUAL, 0, to_the_drop, word))
    return [*program, (_RETURN, 0, 0, 0xFFFF), (_RETURN, 0, 0, 0)]
