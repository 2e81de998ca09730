"""The self-test's packet: a SYN to a port that nobody can listen on, by a socket without hooks.

A raw socket's packet takes the way that any of the node takes: routing, netfilter, the CNI's
programs. Hooks at connect(2), which refuse before there is a packet, do not see it.
"""

import ctypes
import errno
import ipaddress
import socket
import struct

from bpf import abi, path_tests
from probes.netns import Netns

# Any would do: answers come to a port where nobody waits, and the kernel ignores them.
_SOURCE_PORT = 9650
_TTL = 64
_SYN = 0x02
_WINDOW = 64240

_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_IPV6 = struct.Struct("!IHBB16s16s")
_TCP = struct.Struct("!HHIIBBHHH")

# struct sock_filter, and the three of its instructions that are needed (linux/bpf_common.h).
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_SO_ATTACH_FILTER = 26
_ETHERTYPES = {4: 0x0800, 6: 0x86DD}
_SEQUENCE_OFFSET = 4


def send(address: abi.IPAddress, sequence: int) -> None:
    """Send one, at once; it is gone when this returns, or waits for its neighbour's answer.

    sequence: its TCP sequence number, by which `open_witness` knows it. Raises `OSError` when the
    node has no way there, or a filter of the node drops it.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK
    with socket.socket(family, kind, socket.IPPROTO_RAW) as sock:
        # Nothing is sent: it only chooses the source address.
        sock.connect((str(address), 0))
        source = ipaddress.ip_address(sock.getsockname()[0])
        try:
            sock.send(_packet(source.packed, address.packed, sequence))
        except OSError as error:
            # What a gate drops is reported so, where it is reported.
            if error.errno != errno.ENOBUFS:
                raise


def open_witness(netns: Netns, version: int, sequence: int) -> socket.socket:
    """A packet socket inside a pod that hears self-tests with this sequence number, and whatever
    came in the instant before it had its filter: ask `is_self_test` of what it hears.

    Closing it waits for RCU: do that in a thread. Raises NetnsGone, and OSError.
    """
    code = b"".join(
        _INSTRUCTION.pack(*instruction)
        for instruction in (
            (_LOAD_WORD, 0, 0, _sequence_offset(version)),
            (_JUMP_IF_EQUAL, 0, 1, sequence),
            (_RETURN, 0, 0, 0xFFFF),
            (_RETURN, 0, 0, 0),
        )
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // _INSTRUCTION.size, ctypes.addressof(buffer))
    protocol = socket.htons(_ETHERTYPES[version])
    witness = netns.socket(socket.AF_PACKET, socket.SOCK_DGRAM, protocol)
    try:
        witness.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except BaseException:
        witness.close()
        raise
    return witness


def is_self_test(packet: bytes, version: int, sequence: int) -> bool:
    """Whether a witness heard this self-test."""
    offset = _sequence_offset(version)
    return packet[offset : offset + 4] == sequence.to_bytes(4)


def _sequence_offset(version: int) -> int:
    return (_IPV4.size if version == 4 else _IPV6.size) + _SEQUENCE_OFFSET


def _packet(source: bytes, destination: bytes, sequence: int) -> bytes:
    fields = (_SOURCE_PORT, path_tests.PORT, sequence, 0, _TCP.size // 4 << 4, _SYN, _WINDOW)
    pseudo = source + destination + struct.pack("!II", _TCP.size, socket.IPPROTO_TCP)
    tcp = _TCP.pack(*fields, _checksum(pseudo + _TCP.pack(*fields, 0, 0)), 0)
    if len(source) == 4:
        length = _IPV4.size + len(tcp)
        # The kernel fills in the identification and the header's checksum (raw(7)).
        header = _IPV4.pack(
            *(0x45, 0, length, 0, 0, _TTL, socket.IPPROTO_TCP, 0, source, destination)
        )
    else:
        header = _IPV6.pack(6 << 28, len(tcp), socket.IPPROTO_TCP, _TTL, source, destination)
    return header + tcp


def _checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
