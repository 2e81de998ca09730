"""TCP packets, compared with those that the kernel tests build by independent code."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.linux import packets
from tests.kernel import frames

_ADDRESSES = {4: ("198.18.0.1", "198.18.1.1"), 6: ("fd00:18::1", "fd00:18:0:1::1")}


def _ends(version: int) -> frames.Ends:
    source, pod = (ipaddress.ip_address(text) for text in _ADDRESSES[version])
    return frames.Ends(source, pod, source_port=0, port=8080)


@pytest.mark.parametrize("version", [4, 6])
def test_packet_has_correct_headers_and_checksums(version: int) -> None:
    ends = _ends(version)
    segment = frames.tcp(ends, packets.SYN, sequence=7)
    build = frames.ipv4 if version == 4 else frames.ipv6
    assert packets.tcp_packet(
        ends.source.packed,
        ends.pod.packed,
        ports=(ends.source_port, ends.port),
        flags=packets.SYN,
        sequence=7,
    ) == build(ends, frames.TCP, segment)


@given(st.sampled_from([4, 6]), st.binary(max_size=61))
def test_checksum_of_any_segment_is_correct(version: int, data: bytes) -> None:
    ends = _ends(version)
    segment = frames.tcp(ends, packets.ACK, data=data)
    damaged = segment[:16] + b"\xbe\xef" + segment[18:]
    repaired = packets.with_tcp_checksum(ends.source.packed, ends.pod.packed, damaged)
    assert repaired == segment


def test_sequence_number_is_found_after_either_ip_header() -> None:
    for version, (source, destination) in _ADDRESSES.items():
        packet = packets.tcp_packet(
            ipaddress.ip_address(source).packed,
            ipaddress.ip_address(destination).packed,
            ports=(1, 0),
            flags=packets.SYN,
            sequence=0xFFFFFFFE,
        )
        assert packets.has_sequence(packet, version, 0xFFFFFFFE)
        assert not packets.has_sequence(packet, version, 0xFFFFFFFF)
