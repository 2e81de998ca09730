"""TCP segments and IP packets for raw and packet sockets, with checksums and socket filters.

A raw socket's packet takes the path of every packet of the host: routing, netfilter, the CNI's
programs. Hooks at connect(2), which reject before there is a packet, do not see it.
"""

import ctypes
import errno
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence

from bpf.abi import IPAddress
from probes.netns import Netns

SYN, RST, ACK = 0x02, 0x04, 0x10
TCP_HEADER = struct.Struct("!HHIIBBHHH")
"""Ports, sequence, acknowledgement, header length, flags, window, checksum, urgent pointer."""
TCP_CHECKSUM_OFFSET = 16
IPV4_BYTES, IPV6_BYTES = 20, 40
"""Header lengths without options and extension headers."""

Instruction = tuple[int, int, int, int]
"""struct sock_filter: code, jump if true, jump if false, operand (linux/filter.h)."""

_INSTRUCTION = struct.Struct("=HBBI")
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_SO_ATTACH_FILTER = 26
_ETHERTYPES = {4: 0x0800, 6: 0x86DD}
_NO_OPTIONS = TCP_HEADER.size // 4 << 4
_SEQUENCE_OFFSET = 4
_SOURCE_OFFSETS = {4: 12, 6: 8}
_TTL = 64
_WINDOW = 64240


def checksum(data: bytes | bytearray) -> int:
    """The Internet checksum (RFC 1071)."""
    if len(data) % 2:
        data = bytes(data) + b"\0"
    # 65536 is 1 modulo 65535, so the sum of all words is the number that they form, modulo 65535:
    # a seventh of the time. A sum that folds to 65535 is 0 here.
    number = int.from_bytes(data)
    total = number % 0xFFFF
    return 0xFFFF - (total or 0xFFFF if number else 0)


def with_tcp_checksum(source: bytes, destination: bytes, segment: bytes | bytearray) -> bytes:
    """The segment with a correct checksum (RFC 9293, 3.1). Addresses are packed: 4 or 16 bytes."""
    start, end = TCP_CHECKSUM_OFFSET, TCP_CHECKSUM_OFFSET + 2
    blank = bytes(segment[:start]) + b"\0\0" + bytes(segment[end:])
    # The sum of a pseudo header is the same for both families.
    pseudo_header = source + destination + struct.pack("!II", len(blank), socket.IPPROTO_TCP)
    return blank[:start] + checksum(pseudo_header + blank).to_bytes(2) + blank[end:]


def tcp_packet(
    source: bytes,
    destination: bytes,
    *,
    ports: tuple[int, int],
    flags: int,
    sequence: int,
    acknowledgement: int = 0,
    window: int = _WINDOW,
) -> bytes:
    """A TCP segment without options and data, from the IP header on.

    Addresses are packed; ports: source and destination.
    """
    segment = TCP_HEADER.pack(*ports, sequence, acknowledgement, _NO_OPTIONS, flags, window, 0, 0)
    segment = with_tcp_checksum(source, destination, segment)
    if len(source) == 4:
        length = IPV4_BYTES + len(segment)
        header = struct.pack("!BBHHHBBH", 0x45, 0, length, 0, 0, _TTL, socket.IPPROTO_TCP, 0)
        value = checksum(header + source + destination)
        header = header[:-2] + value.to_bytes(2)
    else:
        header = struct.pack("!IHBB", 6 << 28, len(segment), socket.IPPROTO_TCP, _TTL)
    return header + source + destination + segment


def send_syn(address: IPAddress, *, source_port: int, port: int, sequence: int) -> None:
    """Send one SYN; it has left when this returns, or waits for its neighbour's resolution.

    Raises `OSError` when the host has no route to the address, or a netfilter rule drops it.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK
    with socket.socket(family, kind, socket.IPPROTO_RAW) as sock:
        # Nothing is sent: connect only selects the source address.
        sock.connect((str(address), 0))
        source = ipaddress.ip_address(sock.getsockname()[0])
        packet = tcp_packet(
            source.packed,
            address.packed,
            ports=(source_port, port),
            flags=SYN,
            sequence=sequence,
        )
        try:
            sock.send(packet)
        except OSError as error:
            # A drop by a gate's program arrives as ENOBUFS; the gate's counters report it.
            if error.errno != errno.ENOBUFS:
                raise


def open_capture(netns: Netns, version: int, sequence: int) -> socket.socket:
    """A packet socket inside a pod that receives TCP segments with this sequence number.

    It may also receive packets that arrived before its filter was attached: check them with
    `has_sequence`. Closing it waits for RCU: do that in a thread. Raises NetnsGone, and OSError.
    """
    return _open_capture(netns, version, {_sequence_offset(version): sequence})


def open_capture_of(netns: Netns, source: IPAddress) -> socket.socket:
    """As `open_capture`, for packets from this address."""
    start = _SOURCE_OFFSETS[source.version]
    words = enumerate(struct.iter_unpack("!I", source.packed))
    return _open_capture(
        netns, source.version, {start + 4 * index: word for index, (word,) in words}
    )


def _open_capture(netns: Netns, version: int, words: Mapping[int, int]) -> socket.socket:
    """words: four bytes each, by their offset from the IP header on."""
    protocol = socket.htons(_ETHERTYPES[version])
    program: list[Instruction] = []
    for index, (offset, word) in enumerate(words.items()):
        to_the_drop = 2 * (len(words) - index) - 1
        program.append((_LOAD_WORD, 0, 0, offset))
        program.append((_JUMP_IF_EQUAL, 0, to_the_drop, word))
    capture = netns.socket(socket.AF_PACKET, socket.SOCK_DGRAM, protocol)
    try:
        attach_filter(capture, [*program, (_RETURN, 0, 0, 0xFFFF), (_RETURN, 0, 0, 0)])
    except BaseException:
        capture.close()
        raise
    return capture


def has_sequence(packet: bytes, version: int, sequence: int) -> bool:
    """Whether a captured packet, from its IP header on, has this TCP sequence number."""
    offset = _sequence_offset(version)
    return packet[offset : offset + 4] == sequence.to_bytes(4)


def attach_filter(sock: socket.socket, program: Sequence[Instruction]) -> None:
    """Attach a classic BPF program to a socket. Raises `OSError`."""
    code = b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog; the kernel copies the program.
    argument = struct.pack("HP", len(program), ctypes.addressof(buffer))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, argument)


def _sequence_offset(version: int) -> int:
    return (IPV4_BYTES if version == 4 else IPV6_BYTES) + _SEQUENCE_OFFSET
