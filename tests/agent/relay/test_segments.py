"""Opening segments as a packet socket shows them: read, completed, refused."""

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.relay import segments

# A SYN of Linux's to 198.18.64.16 port 8080, captured; its checksum was left to the interface.
_OPTIONS = bytes.fromhex("020405b40402080a0102030400000000") + bytes.fromhex("01030307")


def _syn(*, flags: int = 0x02, options: bytes = _OPTIONS, data: bytes = b"") -> bytes:
    words = (20 + len(options)) // 4
    header = struct.pack("!HHIIBBHHH", 43210, 8080, 77, 0, words << 4, flags, 64240, 0xBEEF, 0)
    return header + options + data


def _ipv4(segment: bytes, *, options: bytes = b"") -> bytes:
    length = 20 + len(options)
    header = struct.pack(
        "!BBHHHBBH4s4s",
        0x40 | length // 4,
        0,
        length + len(segment),
        1,
        0x4000,
        64,
        6,
        0,
        socket.inet_aton("198.18.0.1"),
        socket.inet_aton("198.18.64.16"),
    )
    return header + options + segment


def _ipv6(segment: bytes) -> bytes:
    peer = socket.inet_pton(socket.AF_INET6, "fd00:18::1")
    local = socket.inet_pton(socket.AF_INET6, "fd00:18:ff::10")
    return struct.pack("!IHBB", 6 << 28, len(segment), 6, 64) + peer + local + segment


@pytest.mark.parametrize(
    "packet",
    [
        _ipv4(_syn()),
        _ipv4(_syn(), options=bytes(4)),
        _ipv4(_syn(options=b"")),
        _ipv4(_syn(data=b"odd")),
        _ipv6(_syn()),
        _ipv6(_syn(data=b"fast open")),
    ],
    ids=["ipv4", "ip-options", "no-options", "odd-length", "ipv6", "with-data"],
)
def test_an_opening_goes_on_with_a_right_checksum_and_nothing_else_changed(packet: bytes) -> None:
    opening = segments.read_opening(packet)
    assert opening is not None
    assert (opening.peer_port, opening.port, opening.sequence) == (43210, 8080, 77)
    start = len(packet) - len(opening.packet[opening.packet.index(_PORTS) :])
    segment = opening.packet[start:]
    # Over a segment with its own checksum in it, the sum is 0.
    assert segments.tcp_checksum(opening.peer, opening.local, segment) == 0
    assert opening.packet[: start + 16] == packet[: start + 16]
    assert opening.packet[start + 18 :] == packet[start + 18 :]


_PORTS = struct.pack("!HH", 43210, 8080)


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\x45",
        _ipv4(_syn())[:-1],
        _ipv4(_syn(flags=0x12)),
        _ipv4(_syn(flags=0x10)),
        _ipv4(b"\0" * 8),
        _ipv6(_syn())[:50],
        _ipv6(_syn(flags=0x10)),
        _ipv4(_syn()).replace(b"\x40\x06", b"\x40\x11", 1),
    ],
)
def test_what_opens_nothing_is_no_opening(packet: bytes) -> None:
    assert segments.read_opening(packet) is None


@given(st.binary(max_size=200))
def test_whatever_bytes_come_none_is_taken_amiss(packet: bytes) -> None:
    opening = segments.read_opening(packet)
    assert opening is None or len(opening.packet) <= len(packet)


@pytest.mark.parametrize("packet", [_ipv4(_syn()), _ipv6(_syn())], ids=["ipv4", "ipv6"])
def test_a_refusal_answers_the_opening_and_acknowledges_it(packet: bytes) -> None:
    opening = segments.read_opening(packet)
    assert opening is not None
    refusal = segments.refusal(opening)
    segment = refusal[-20:]
    port, peer_port, sequence, acknowledged, _, flags = struct.unpack("!HHIIBB", segment[:14])
    assert (port, peer_port, sequence, acknowledged, flags) == (8080, 43210, 0, 78, 0x14)
    assert refusal[:-20].endswith(opening.local + opening.peer)
    assert segments.tcp_checksum(opening.local, opening.peer, segment) == 0


def test_the_sequence_number_behind_the_last_is_the_first() -> None:
    packet = bytearray(_ipv4(_syn()))
    packet[24:28] = b"\xff\xff\xff\xff"
    opening = segments.read_opening(bytes(packet))
    assert opening is not None
    assert segments.refusal(opening)[-12:-8] == bytes(4)
