"""SYNs as a packet socket receives them: parsed, completed, rejected."""

import ipaddress
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.linux import packets
from agent.relay import segments

# A captured Linux SYN to 198.18.64.16 port 8080; its checksum was left to the interface.
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


ENDS = [
    tuple(map(ipaddress.ip_address, ends))
    for ends in (("198.18.0.1", "198.18.64.16"), ("fd00:18::1", "fd00:18:ff::10"))
]


@pytest.mark.parametrize(
    "packet",
    [
        _ipv4(_syn()),
        _ipv4(_syn(), options=bytes(4)),
        _ipv4(_syn(options=b"")),
        _ipv4(_syn(data=b"odd")),
        _ipv6(_syn()),
        _ipv6(_syn(data=b"fast open")),
        _ipv4(_syn(data=bytes(300))),
        _ipv6(_syn(data=bytes(300))),
    ],
    ids=[
        *("ipv4", "ip-options", "no-options", "odd-length", "ipv6", "with-data"),
        *("ipv4-long", "ipv6-long"),
    ],
)
def test_only_the_checksum_of_a_syn_changes(packet: bytes) -> None:
    syn = segments.parse_syn(packet)
    assert syn is not None
    assert tuple(map(ipaddress.ip_address, (syn.peer, syn.local))) in ENDS
    assert (syn.peer_port, syn.port, syn.sequence) == (43210, 8080, 77)
    start = len(packet) - len(syn.packet[syn.packet.index(_PORTS) :])
    segment = syn.packet[start:]
    assert packets.with_tcp_checksum(syn.peer, syn.local, segment) == segment
    assert syn.packet[: start + 16] == packet[: start + 16]
    assert syn.packet[start + 18 :] == packet[start + 18 :]


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
        _ipv4(_syn(options=b"")[:19]),
        _ipv6(_syn(options=b"")[:19]),
        _ipv6(_syn())[:50],
        _ipv6(_syn(flags=0x10)),
        _ipv4(_syn()).replace(b"\x40\x06", b"\x40\x11", 1),
    ],
)
def test_other_packets_are_not_syns(packet: bytes) -> None:
    assert segments.parse_syn(packet) is None


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_handled(packet: bytes) -> None:
    syn = segments.parse_syn(packet)
    assert syn is None or len(syn.packet) <= len(packet)


@pytest.mark.parametrize("packet", [_ipv4(_syn()), _ipv6(_syn())], ids=["ipv4", "ipv6"])
def test_reset_acknowledges_the_syn(packet: bytes) -> None:
    syn = segments.parse_syn(packet)
    assert syn is not None
    reset = segments.reset_for(syn)
    segment = reset[-20:]
    assert struct.unpack("!HHIIBBH", segment[:16]) == (8080, 43210, 0, 78, 5 << 4, 0x14, 0)
    assert reset[:-20].endswith(syn.local + syn.peer)
    assert packets.with_tcp_checksum(syn.local, syn.peer, segment) == segment


def test_acknowledgement_wraps_around() -> None:
    packet = bytearray(_ipv4(_syn()))
    packet[24:28] = b"\xff\xff\xff\xff"
    syn = segments.parse_syn(bytes(packet))
    assert syn is not None
    assert segments.reset_for(syn)[-12:-8] == bytes(4)
