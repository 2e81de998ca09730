"""Records how TCP connections of the node begin and end, so that a test can show where a lost one
was dropped."""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

from agent.linux import packets
from tests.kernel.capture import PACKET_OUTGOING

_ETH_P_ALL = 0x0003
_SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 33, 35
_TIMESPEC = struct.Struct("=qq")
_BUFFER_BYTES = 32 << 20
_READ_BYTES = 128
_FLAGS_OFFSET = 13
_FLAGS = {0x02: "SYN", 0x04: "RST", 0x10: "ACK"}

# linux/filter.h, linux/bpf_common.h.
_LOAD_BYTE, _LOAD_INDEXED, _LOAD_HEADER_LENGTH = 0x30, 0x50, 0xB1
_AND, _JUMP_IF_EQUAL, _JUMP_IF_ANY, _RETURN = 0x54, 0x15, 0x45, 0x06
_SYN_OR_RST = 0x06

# From the IP header on: a socket of type SOCK_DGRAM has no other before it.
_FILTER: tuple[packets.Instruction, ...] = (
    (_LOAD_BYTE, 0, 0, 0),
    (_AND, 0, 0, 0xF0),
    (_JUMP_IF_EQUAL, 0, 5, 0x40),
    (_LOAD_BYTE, 0, 0, 9),
    (_JUMP_IF_EQUAL, 0, 8, socket.IPPROTO_TCP),
    (_LOAD_HEADER_LENGTH, 0, 0, 0),
    (_LOAD_INDEXED, 0, 0, _FLAGS_OFFSET),
    (_JUMP_IF_ANY, 4, 5, _SYN_OR_RST),
    (_LOAD_BYTE, 0, 0, 6),
    (_JUMP_IF_EQUAL, 0, 3, socket.IPPROTO_TCP),
    (_LOAD_BYTE, 0, 0, packets.IPV6_BYTES + _FLAGS_OFFSET),
    (_JUMP_IF_ANY, 0, 1, _SYN_OR_RST),
    (_RETURN, 0, 0, _READ_BYTES),
    (_RETURN, 0, 0, 0),
)


class Handshakes:
    """SYNs, their answers and RSTs at all interfaces of this process's namespace.

    The kernel's taps see an outgoing packet after the gate, and an incoming one before.
    """

    def __init__(self) -> None:
        """Records from here on."""
        self._lines: list[tuple[tuple[int, int], float, str]] = []
        # The kernel's stamps are of the wall clock, the tests' times of the monotonic one.
        self._clocks_differ_seconds = time.time() - time.monotonic()
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        self._tap = socket.socket(socket.AF_PACKET, kind, socket.htons(_ETH_P_ALL))
        packets.attach_filter(self._tap, _FILTER)
        self._tap.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        for _ in self._received():  # before the filter
            pass

    def close(self) -> None:
        """Stop recording; what was recorded stays."""
        with self._tap:
            for packet, at, interface, is_outgoing in self._received():
                segment = packet[_header_bytes(packet) :]
                ports = struct.unpack_from("!HH", segment)
                flags = [name for bit, name in _FLAGS.items() if segment[_FLAGS_OFFSET] & bit]
                line = (
                    f"{'to' if is_outgoing else 'from'} {interface}: {'+'.join(flags)} "
                    f"from port {ports[0]} to port {ports[1]}"
                )
                self._lines.append(((ports[0], ports[1]), at, line))

    def _received(self) -> Iterator[tuple[bytes, float, str, bool]]:
        """From the IP header on, with its monotonic time, the interface, and whether it went out
        there."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet, ancillary, _, (interface, _, kind, *_) = self._tap.recvmsg(
                    _READ_BYTES, socket.CMSG_SPACE(_TIMESPEC.size)
                )
                seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2]) if ancillary else (0, 0)
                at = seconds + nanoseconds / 1e9 - self._clocks_differ_seconds
                yield packet, at, interface, kind == PACKET_OUTGOING

    def of_port(self, port: int, since: float) -> list[str]:
        """One line for each segment from or to this port, oldest first, with the seconds since this
        monotonic time; after `close`."""
        return [f"{at - since:+.3f} {line}" for ports, at, line in self._lines if port in ports]


def _header_bytes(packet: bytes) -> int:
    return (packet[0] & 15) * 4 if packet[0] >> 4 == 4 else packets.IPV6_BYTES


@contextlib.contextmanager
def recorded() -> Iterator[Handshakes]:
    made = Handshakes()
    try:
        yield made
    finally:
        made.close()
