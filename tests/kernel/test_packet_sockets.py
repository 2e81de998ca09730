"""Attacks with packet sockets other than plain frames at the pod's interface: loopback, pairs of
interfaces within the host, rings, and checksums that are filled in later."""

import contextlib
import ctypes
import dataclasses
import fcntl
import mmap
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from bpf import injectable, loader
from bpf.gates import GateConfig, Gates
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, wire
from tests.kernel.counting import Counting

pytestmark = pytest.mark.kernel

DROPPED = (Verdict.DROP, Reason.NODE)
SOL_PACKET = 263
PACKET_VNET_HDR = 15
VIRTIO_NET_HDR_F_NEEDS_CSUM = 1
PACKET_TX_RING, PACKET_VERSION = 13, 10
TPACKET_V2, TPACKET2_HEADER, TP_STATUS_SEND_REQUEST = 1, 32, 1
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17


@pytest.fixture
def pod(lab: labs.Lab) -> labs.LabPod:
    return lab.add_pod("web", 1)


@pytest.fixture
def line(pod: labs.LabPod) -> Iterator[wire.Wire]:
    with pod.listen(80), wire.Wire(pod) as made:
        made.warm_up()
        yield made


END_PORT = 9


def enforce(gates: Gates, pod: labs.LabPod) -> Counting:
    # The datagram that marks the end of what was sent (see `passed`).
    end = Rule(SourceKind.ANY, socket.IPPROTO_UDP, END_PORT, END_PORT)
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, (end,)))
    return Counting(gates, pod.ifindex)


@contextlib.contextmanager
def packet_socket(interface: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sock:
        sock.bind((interface, 0))
        yield sock


def routed(line: wire.Wire, family: int, source: str) -> frames.Ends:
    """From a forged source; the frame goes to the node, which routes it to the pod."""
    return dataclasses.replace(line.ends(family, source=source), pod_mac=bytes(6))


def passed(line: wire.Wire, payload: bytes) -> bool:
    """Whether a frame with `payload` reached the pod; it was routed, so its link header is new."""
    end = b"podgate-end"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # A rule admits it, and it uses the same queue as the packets routed before it.
        sock.sendto(end, (line.pod.ipv4, END_PORT))
    is_there = False
    while True:
        frame = line.inside.recv(1 << 16)
        is_there |= payload in frame
        if end in frame:
            return is_there


FORGED = [(4, "198.18.9.9"), (6, "fd00:18:9::9")]
# Segments that disturb a connection of the pod with another peer: data, its end, an answer.
INTO_A_CONNECTION = [frames.ACK | frames.PSH, frames.FIN | frames.ACK, frames.SYN | frames.ACK]


@pytest.mark.parametrize(("family", "source"), FORGED)
@pytest.mark.parametrize("flags", [frames.SYN, *INTO_A_CONNECTION])
def test_frame_put_into_the_loopback_is_dropped(
    line: wire.Wire, gates: Gates, family: int, source: str, flags: int
) -> None:
    ends = routed(line, family, source)
    frame = frames.segment(ends, flags, data=b"from-lo")
    with packet_socket("lo") as sock:
        wire.send(sock, frame)
        assert passed(line, b"from-lo")  # the path works: only the gate can drop the next one
        counting = enforce(gates, line.pod)
        wire.send(sock, frame)
        assert not passed(line, b"from-lo")
    assert counting.moved()[DROPPED] == 1


@pytest.fixture
def pair(lab: labs.Lab) -> Iterator[tuple[str, int, bytes]]:
    """A veth pair within the node: the sending half's name, the other's number and MAC."""
    commands = "link add inner0 type veth peer inner1\nlink set inner0 up\nlink set inner1 up\n"
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    with packet_socket("inner1") as sock:
        mac = sock.getsockname()[4]
    yield "inner0", socket.if_nametoindex("inner1"), mac
    subprocess.run(["ip", "link", "del", "inner0"], check=True)


@pytest.mark.parametrize(("family", "source"), FORGED)
def test_frame_from_a_pair_within_the_node_is_dropped_once_marked(
    line: wire.Wire,
    gates: Gates,
    loaded: loader.Loaded,
    pair: tuple[str, int, bytes],
    family: int,
    source: str,
) -> None:
    sender, ifindex, mac = pair
    marks = injectable.InjectableMap(loaded)
    ends = dataclasses.replace(routed(line, family, source), pod_mac=mac)
    frame = frames.segment(ends, frames.SYN, data=b"from-pair")
    counting = enforce(gates, line.pod)
    with packet_socket(sender) as sock:
        wire.send(sock, frame)
        assert passed(line, b"from-pair")  # forwarded, according to the gate
        assert DROPPED not in counting.moved()
        marks.mark(ifindex, is_node_sent=True)
        try:
            wire.send(sock, frame)
            assert not passed(line, b"from-pair")
        finally:
            marks.mark(ifindex, is_node_sent=False)
    assert counting.moved()[DROPPED] == 1


@contextlib.contextmanager
def frame_in_ring(sock: socket.socket, frame: bytes) -> Iterator[memoryview]:
    """PACKET_TX_RING: of such a frame only 14 bytes are linear, and the rest stays writable."""
    size = mmap.PAGESIZE
    sock.setsockopt(SOL_PACKET, PACKET_VERSION, TPACKET_V2)
    sock.setsockopt(SOL_PACKET, PACKET_TX_RING, struct.pack("=IIII", size, 1, size, 1))
    with mmap.mmap(sock.fileno(), size) as ring, memoryview(ring) as content:
        content[4:8] = struct.pack("=I", len(frame))
        with content[TPACKET2_HEADER : TPACKET2_HEADER + len(frame)] as written:
            written[:] = frame
            content[0:4] = struct.pack("=I", TP_STATUS_SEND_REQUEST)
            yield written


def send_by_ring(interface: str, frame: bytes) -> None:
    with packet_socket(interface) as sock, frame_in_ring(sock, frame):
        wire.send(sock, b"")


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("data", [b"", bytes(1000)])
def test_frame_from_a_packet_ring_is_dropped(
    line: wire.Wire, gates: Gates, family: int, data: bytes
) -> None:
    ends = line.ends(family)
    send_by_ring(line.pod.interface, frames.segment(ends, frames.SYN, data=data))
    assert line.flush().opened(ends)

    ends = line.ends(family, source_port=20001)
    counting = enforce(gates, line.pod)
    send_by_ring(line.pod.interface, frames.segment(ends, frames.SYN, data=data))
    seen = line.flush()
    assert seen.arrived == ()
    assert not seen.opened(ends)
    assert counting.moved()[DROPPED] == 1


@contextlib.contextmanager
def held_queue(line: wire.Wire) -> Iterator[Callable[[], None]]:
    """What the host sends to the pod waits behind the gate until the yielded function is called, as
    in the queue of the CNI's bandwidth plugin."""
    queue = ("dev", line.pod.interface, "root", "tbf", "burst", "1600", "limit", "100000")

    def release() -> None:
        subprocess.run(["tc", "qdisc", "change", *queue, "rate", "1gbit"], check=True)

    subprocess.run(["tc", "qdisc", "add", *queue, "rate", "8bit"], check=True)
    try:
        filler = frames.arp(line.ends(4), operation=9) + bytes(1000)
        for _ in range(2):  # the burst has room for one, which the other has to wait for
            wire.send(line.node, filler)
        yield release
    finally:
        subprocess.run(["tc", "qdisc", "del", *queue[:3]], check=True)


@pytest.mark.parametrize("family", [4, 6])
def test_frame_of_a_packet_ring_cannot_change_behind_the_gate(
    line: wire.Wire, gates: Gates, family: int
) -> None:
    ends = line.ends(family)
    other_port = dataclasses.replace(ends, port=81)
    rule = Rule(SourceKind.ANY, socket.IPPROTO_TCP, other_port.port, other_port.port)
    gates.install(line.pod.ifindex, GateConfig(Mode.ENFORCE, line.pod.addresses, (rule,)))
    shown = frames.segment(other_port, frames.SYN)
    # By the acknowledgement, which a SYN does not use, the checksum is the same.
    changed = frames.segment(ends, frames.SYN, acknowledged=1)
    with (
        packet_socket(line.pod.interface) as sock,
        frame_in_ring(sock, shown) as written,
        held_queue(line) as release,
    ):
        sock.send(b"", socket.MSG_DONTWAIT)
        written[:] = changed
        release()
        seen = line.flush()
    assert shown in seen.arrived
    assert not seen.opened(ends)


def switch_off_checksum_offload(interface: str) -> None:
    """As some CNIs do to the interfaces of pods."""
    command = ctypes.create_string_buffer(struct.pack("=II", ETHTOOL_STXCSUM, 0))
    request = struct.pack("16sP", interface.encode(), ctypes.addressof(command))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCETHTOOL, request)


def disguised_syn(line: wire.Wire, family: int, first_port: int) -> tuple[frames.Ends, bytes]:
    """A RST that becomes a SYN when the kernel fills in the "checksum" of bytes from 2 of the
    segment on into bytes 12 and 13: data offset and flags. The port is chosen so that it fits."""
    wanted = 0x5000 | frames.SYN
    for port in range(first_port, 1 << 16):
        ends = line.ends(family, source_port=port)
        shown = bytearray(frames.tcp(ends, frames.SYN))
        shown[13] = frames.RST
        if frames.checksum(bytes(shown[2:])) == wanted:
            frame = frames.packet(ends, frames.TCP, bytes(shown))
            start = len(frame) - len(shown) + 2
            header = struct.pack("=BBHHHH", VIRTIO_NET_HDR_F_NEEDS_CSUM, 0, 0, 0, start, 10)
            return ends, header + frame
    raise AssertionError("there is one in every 65,536")


@pytest.mark.parametrize("family", [4, 6])
def test_frame_that_is_rewritten_behind_the_gate_is_dropped(
    line: wire.Wire, gates: Gates, family: int
) -> None:
    switch_off_checksum_offload(line.pod.interface)
    ends, frame = disguised_syn(line, family, first_port=1024)
    with packet_socket(line.pod.interface) as sock:
        sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        wire.send(sock, frame)
        assert line.flush().opened(ends)
        counting = enforce(gates, line.pod)
        wire.send(sock, frame)
        seen = line.flush()
    assert seen.arrived == ()
    assert not seen.opened(ends)
    assert counting.moved()[Verdict.DROP, Reason.UNPARSABLE] == 1


@pytest.mark.parametrize("source", ["198.18.9.9"])
def test_frame_that_is_rewritten_later_is_dropped_by_way_of_the_loopback_too(
    line: wire.Wire, gates: Gates, source: str
) -> None:
    ends = routed(line, 4, source)
    header = struct.pack("=BBHHHH", VIRTIO_NET_HDR_F_NEEDS_CSUM, 0, 0, 0, 34, 16)
    frame = header + frames.segment(ends, frames.RST, data=b"rewritten")
    counting = enforce(gates, line.pod)
    with packet_socket("lo") as sock:
        sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        wire.send(sock, frame)
        assert not passed(line, b"rewritten")
    assert counting.moved()[Verdict.DROP, Reason.UNPARSABLE] == 1


def test_frame_that_passes_arrives_as_it_was(line: wire.Wire, gates: Gates) -> None:
    """The gate tries a helper on the first bytes and puts them back."""
    enforce(gates, line.pod)
    ends = dataclasses.replace(line.ends(4), port=END_PORT)
    frame = frames.packet(ends, frames.UDP, frames.udp(ends))
    assert line.inject([frame]).arrived == (frame,)
