"""TCP packets, compared with those that the kernel tests build by independent code."""

import ipaddress
import socket
from collections.abc import Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.linux import packets
from bpf.abi import IPAddress
from probes.netns import Netns
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


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # The example of RFC 1071, 3.
        (b"\x00\x01\xf2\x03\xf4\xf5\xf6\xf7", 0x220D),
        (b"\x01", 0xFEFF),
        (b"", 0xFFFF),
        (bytes(4), 0xFFFF),
        (b"\xff\xff", 0),
        (b"\xff\xfe\x00\x01", 0),
    ],
)
def test_checksum_is_the_internet_s(data: bytes, expected: int) -> None:
    assert packets.checksum(data) == packets.checksum(bytearray(data)) == expected


def test_reset_answers_with_its_own_fields() -> None:
    source, destination = (bytes(map(int, text.split("."))) for text in _ADDRESSES[4])
    packet = packets.tcp_packet(
        source,
        destination,
        ports=(80, 4000),
        flags=packets.RST | packets.ACK,
        sequence=9,
        acknowledgement=0x01020304,
        window=5,
    )
    fields = packets.TCP_HEADER.unpack(packet[20:])
    assert fields[:6] == (80, 4000, 9, 0x01020304, 0x50, 0x14)
    assert (fields[6], fields[8]) == (5, 0)
    assert packets.checksum(packet[:20]) == 0


class Pod:
    """A namespace with one packet socket, which keeps the filter that it gets."""

    def __init__(self) -> None:
        self.sock, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.requests: list[tuple[int, int, int]] = []

    def socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        self.requests.append((family, kind, protocol))
        return self.sock

    def received(self, *sent: bytes) -> list[bytes]:
        """What passes the filter."""
        self.sock.setblocking(False)
        for packet in sent:
            self._other.send(packet)
        found = []
        try:
            while True:
                found.append(self.sock.recv(1 << 16))
        except BlockingIOError:
            return found

    def close(self) -> None:
        self.sock.close()
        self._other.close()


@pytest.fixture
def pod() -> Iterator[Pod]:
    made = Pod()
    yield made
    made.close()


def syn(source: IPAddress, destination: IPAddress, sequence: int) -> bytes:
    return packets.tcp_packet(
        source.packed, destination.packed, ports=(1, 2), flags=packets.SYN, sequence=sequence
    )


@pytest.mark.parametrize(("version", "ethertype"), [(4, 0x0800), (6, 0x86DD)])
def test_capture_has_the_segments_of_a_sequence_number(
    pod: Pod, version: int, ethertype: int
) -> None:
    source, destination = (ipaddress.ip_address(text) for text in _ADDRESSES[version])
    wanted, *others = (
        syn(source, destination, sequence) for sequence in (0xFFFFFFFE, 0xFFFFFFFF, 7)
    )
    capture = packets.open_capture(cast(Netns, pod), version, 0xFFFFFFFE)
    assert capture is pod.sock
    assert pod.requests == [(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ethertype))]
    assert pod.received(*others, wanted, wanted[:20]) == [wanted]


@pytest.mark.parametrize("version", [4, 6])
def test_capture_has_all_packets_of_a_source(pod: Pod, version: int) -> None:
    source, destination = (ipaddress.ip_address(text) for text in _ADDRESSES[version])
    wanted = [syn(source, destination, sequence) for sequence in (7, 8)]
    near = [type(source)(int(source) ^ 1 << bit) for bit in range(0, source.max_prefixlen, 8)]
    others = [syn(other, destination, 7) for other in (*near, destination)]
    packets.open_capture_of(cast(Netns, pod), source)
    assert pod.received(*others, *wanted) == wanted


def test_capture_whose_filter_is_rejected_is_closed(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(packets, "attach_filter", fail)
    with pytest.raises(OSError, match="no memory"):
        packets.open_capture(cast(Netns, pod), 4, 7)
    assert pod.sock.fileno() == -1
