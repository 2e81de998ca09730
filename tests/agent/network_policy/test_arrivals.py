"""Packets that are sent, and which of those that are received count. Real sockets of this process.

tests/kernel/test_arrivals.py has packet sockets, and namespaces.
"""

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import cast

import pytest

from agent.linux import packets
from agent.network_policy.arrivals import Arrivals, Sent
from agent.network_policy.checks import Flow
from bpf.abi import IPAddress
from probes.netns import Netns

HERE = ipaddress.ip_address("127.0.0.1")


class OwnNetns:
    """The one of this process."""

    def __init__(self) -> None:
        self.made: list[socket.socket] = []

    def socket(self, family: int, kind: int) -> socket.socket:
        self.made.append(socket.socket(family, kind | socket.SOCK_NONBLOCK))
        return self.made[-1]


class Pair:
    """Two ends; `wire` is where the destination's packets come from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, address: IPAddress) -> None:
        capture, self.wire = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        capture.setblocking(False)
        self.captured: list[tuple[Netns, IPAddress]] = []

        def open_capture_of(netns: Netns, source: IPAddress) -> socket.socket:
            self.captured.append((netns, source))
            return capture

        monkeypatch.setattr(packets, "open_capture_of", open_capture_of)
        self.source = OwnNetns()
        self.destination = Netns("/run/netns/web", 4, 1)
        self.arrivals = Arrivals((cast(Netns, self.source), address), (self.destination, address))

    def close(self) -> None:
        self.arrivals.close()
        self.wire.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    made = Pair(monkeypatch, HERE)
    yield made
    made.close()


@contextlib.contextmanager
def bound(kind: socket.SocketKind) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, kind) as made:
        made.bind((str(HERE), 0))
        made.settimeout(30)
        if kind is socket.SOCK_STREAM:
            made.listen()
        yield made


def ipv4(sent: Sent, *, options: int = 0) -> bytes:
    """As a packet socket has it, with the first bytes of what follows the header."""
    head = bytearray(20 + 4 * options)
    head[0] = 0x45 + options
    head[9] = sent.protocol
    return bytes(head) + struct.pack("!HHI", *sent.ports, 0)


def ipv6(sent: Sent) -> bytes:
    head = bytearray(40)
    head[0], head[6] = 0x60, sent.protocol
    return bytes(head) + struct.pack("!HH", *sent.ports)


def test_tcp_flow_is_a_connection_from_the_port_that_is_awaited(pair: Pair) -> None:
    with bound(socket.SOCK_STREAM) as listener:
        port = listener.getsockname()[1]
        sent = pair.arrivals.send(Flow("TCP", port))
        accepted, peer = listener.accept()
        accepted.close()
    assert sent == Sent(socket.IPPROTO_TCP, (peer[1], port))
    assert pair.captured == [(pair.destination, HERE)]


def test_udp_flow_is_an_empty_datagram_from_the_port_that_is_awaited(pair: Pair) -> None:
    with bound(socket.SOCK_DGRAM) as receiver:
        port = receiver.getsockname()[1]
        sent = pair.arrivals.send(Flow("UDP", port))
        data, peer = receiver.recvfrom(100)
    assert (data, peer[0]) == (b"", str(HERE))
    assert sent == Sent(socket.IPPROTO_UDP, (peer[1], port))


def test_rejected_flow_is_one_that_was_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with bound(socket.SOCK_STREAM) as listener:
        port = listener.getsockname()[1]
    assert pair.arrivals.send(Flow("TCP", port)).ports[1] == port

    class Rejecting(socket.socket):
        def sendto(self, *_: object) -> int:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(pair.source, "socket", lambda *kind: Rejecting(*kind))
    assert pair.arrivals.send(Flow("UDP", 9)).ports[1] == 9


def test_flow_that_cannot_be_sent_is_an_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(socket.socket):
        def sendto(self, *_: object) -> int:
            raise OSError(105, "No buffer space available")

    monkeypatch.setattr(pair.source, "socket", lambda *kind: Failing(*kind))
    with pytest.raises(OSError, match="No buffer space"):
        pair.arrivals.send(Flow("UDP", 9))


def test_only_the_packet_that_was_sent_has_arrived(pair: Pair) -> None:
    first, second = (pair.arrivals.send(Flow("UDP", port)) for port in (9, 10))
    assert not pair.arrivals.has(first)
    others = [
        Sent(socket.IPPROTO_TCP, first.ports),
        Sent(first.protocol, (first.ports[0] ^ 1, 9)),
        Sent(first.protocol, (first.ports[0], 11)),
        Sent(first.protocol, first.ports[::-1]),
    ]
    for packet in (b"", b"\x45", ipv4(first)[:23], ipv6(first)[:43], *map(ipv4, others)):
        pair.wire.send(packet)
    assert not pair.arrivals.has(first)
    pair.wire.send(ipv4(second))
    assert not pair.arrivals.has(first)
    pair.wire.send(ipv4(first, options=10))
    assert pair.arrivals.has(first)
    # Both stay so.
    assert pair.arrivals.has(second)
    assert pair.arrivals.has(first)


def test_packet_without_options_has_its_ports_behind_the_header(pair: Pair) -> None:
    sent = pair.arrivals.send(Flow("UDP", 9))
    pair.wire.send(ipv4(sent)[:24])
    assert pair.arrivals.has(sent)


def test_packets_of_both_families_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, ipaddress.ip_address("::1"))
    sent = pair.arrivals.send(Flow("UDP", 9))
    assert pair.source.made[0].family is socket.AF_INET6
    pair.wire.send(ipv6(sent))
    assert pair.arrivals.has(sent)
    pair.close()


def test_flood_of_packets_is_read_a_part_at_a_time(pair: Pair) -> None:
    sent = pair.arrivals.send(Flow("UDP", 9))
    for _ in range(64):
        pair.wire.send(b"x")
    pair.wire.send(ipv4(sent))
    assert not pair.arrivals.has(sent)
    assert pair.arrivals.has(sent)


def test_all_sockets_are_closed(pair: Pair) -> None:
    for port in (9, 10):
        pair.arrivals.send(Flow("UDP", port))
    assert pair.arrivals.fileno() >= 0
    pair.arrivals.close()
    assert pair.arrivals.fileno() == -1
    assert [one.fileno() for one in pair.source.made] == [-1, -1]
