"""A VPN's process leaves checksums to the kernel: it writes packets to its tun interface that have
none yet, as the host's own stack does. They are answers to what enforced pods have sent.
"""

import contextlib
import dataclasses
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from agent.lab.lab import Lab, LabPod
from bpf import features, loader
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode, Verdict
from tests.kernel import frames, links, offers, traffic
from tests.kernel.counting import Counting
from tests.kernel.reply_tables import start_reply_table
from tests.kernel.test_bypass_reentry import marked
from tests.kernel.test_packet_sockets import VIRTIO_NET_HDR_F_NEEDS_CSUM

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6], ids=["ipv4", "ipv6"])
MODES = pytest.mark.parametrize("mode", [Mode.AUDIT, Mode.ENFORCE, Mode.STRICT])

REMOTE = {4: "198.18.120.1", 6: "fd00:18:120::1"}
PORT = 7000
IP_LENGTH = {4: 20, 6: 40}
CHECKSUM_OFFSET = {frames.TCP: 16, frames.UDP: 6}
VIRTIO_LENGTH = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Vpn:
    """The process, by the descriptor of its interface."""

    descriptor: int
    version: int

    def receive(self, protocol: int) -> bytes:
        """The segment of the next packet of this protocol from a pod."""
        while True:
            packet = os.read(self.descriptor, 1 << 16)[VIRTIO_LENGTH:]
            kind = packet[9] if self.version == 4 else packet[6]
            if packet[0] >> 4 == self.version and kind == protocol:
                return packet[IP_LENGTH[self.version] :]

    def answer(self, pod: LabPod, protocol: int, segment: bytes) -> None:
        """With the checksum pending: its field has the pseudo header's sum."""
        source, destination = (
            frames.address(text)
            for text in (REMOTE[self.version], traffic.address(pod, self.version))
        )
        pseudo = source.packed + destination.packed + struct.pack("!II", len(segment), protocol)
        at = CHECKSUM_OFFSET[protocol]
        partial = struct.pack("!H", frames.checksum(pseudo) ^ 0xFFFF)
        start = IP_LENGTH[self.version]
        header = struct.pack("=BBHHHH", VIRTIO_NET_HDR_F_NEEDS_CSUM, 0, 0, 0, start, at)
        build = frames.ipv4 if self.version == 4 else frames.ipv6
        whole = build(
            frames.Ends(source, destination), protocol, segment[:at] + partial + segment[at + 2 :]
        )
        os.write(self.descriptor, header + whole)


@pytest.fixture
def vpn(lab: Lab, loaded: loader.Loaded, version: int) -> Iterator[Vpn]:
    """Its routes lead to REMOTE."""
    offers.need_features((features.KERNEL_READ,))
    with links.tun(with_header=True) as (name, descriptor), marked(loaded, name):
        links.ip(*(f"route add {address} dev {name}" for address in REMOTE.values()))
        yield Vpn(descriptor, version)


@pytest.fixture
def pod(lab: Lab) -> LabPod:
    return lab.add_pod("web", 1)


@contextlib.contextmanager
def nothing_dropped(gates: Gates, pod: LabPod, mode: Mode) -> Iterator[None]:
    gates.install(pod.ifindex, GateConfig(mode, pod.addresses))
    start_reply_table(gates, pod.ifindex)
    counting = Counting(gates, pod.ifindex)
    yield
    assert {verdict for verdict, _ in counting.moved()} == {Verdict.PASS}


@MODES
@VERSIONS
def test_answers_of_a_vpn_pass(
    vpn: Vpn, pod: LabPod, gates: Gates, version: int, mode: Mode
) -> None:
    with (
        nothing_dropped(gates, pod, mode),
        pod.open_socket(traffic.family(version), socket.SOCK_DGRAM) as client,
    ):
        client.connect((REMOTE[version], PORT))
        client.send(b"question")
        source_port, port = struct.unpack_from("!HH", vpn.receive(frames.UDP))
        answer = b"from the other end"
        vpn.answer(
            pod,
            frames.UDP,
            struct.pack("!HHHH", port, source_port, 8 + len(answer), 0) + answer,
        )
        assert client.recv(100) == answer


@MODES
@VERSIONS
def test_connection_through_a_vpn_opens_and_carries_data(
    vpn: Vpn, pod: LabPod, gates: Gates, version: int, mode: Mode
) -> None:
    with (
        nothing_dropped(gates, pod, mode),
        pod.open_socket(traffic.family(version), socket.SOCK_STREAM) as client,
    ):
        client.setblocking(False)
        client.connect_ex((REMOTE[version], PORT))
        source_port, port, sequence = struct.unpack_from("!HHI", vpn.receive(frames.TCP))
        ends = frames.Ends(
            frames.address(REMOTE[version]),
            frames.address(traffic.address(pod, version)),
            source_port=port,
            port=source_port,
        )
        acknowledged = sequence + 1 & 0xFFFFFFFF
        opened = frames.tcp(ends, frames.SYN | frames.ACK, acknowledged=acknowledged)
        vpn.answer(pod, frames.TCP, opened)
        vpn.receive(frames.TCP)
        data = b"from the other end"
        segment = frames.tcp(
            ends, frames.ACK | frames.PSH, data=data, sequence=1001, acknowledged=acknowledged
        )
        vpn.answer(pod, frames.TCP, segment)
        client.settimeout(1)
        assert client.recv(100) == data
