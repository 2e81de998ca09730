"""Frames that are not what they seem: hard to read, rewritten behind the gate, or without the
socket that would show their source.
"""

import contextlib
import dataclasses
import os
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from bpf import abi, features, loader, map_specs, pins
from bpf.gates import Attachment, Gates
from bpf.host_devices import HostDevicePrograms
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, links, offers, syns, traffic, wire
from tests.kernel.counting import Counting
from tests.kernel.guarded import PodState
from tests.kernel.test_bypass_reentry import (  # noqa: F401
    Way,
    end_by,
    ends_to,
    marked,
    programs,
    watched,
)
from tests.kernel.test_packet_sockets import (
    PACKET_VNET_HDR,
    SOL_PACKET,
    VIRTIO_NET_HDR_F_NEEDS_CSUM,
    switch_off_checksum_offload,
)
from tests.kernel.test_untouched_gateway_pairs import as_the_agent_does
from tests.kernel.test_untouched_gateway_pairs import pods as pods_behind_pair  # noqa: F401

pytestmark = pytest.mark.kernel

ETHERNET_LENGTH = 14

VERSIONS = pytest.mark.parametrize("version", [4, 6])

UNREADABLE = {(Verdict.DROP, Reason.UNPARSABLE): 1}


def disguised(ends: frames.Ends) -> bytes:
    """A RST that becomes a SYN when bytes 12 and 13 of the segment are filled in; virtio's header
    first. See tests/kernel/test_packet_sockets.py."""
    wanted = 0x5000 | frames.SYN
    for port in range(1024, 1 << 16):
        trial = dataclasses.replace(ends, source_port=port)
        shown = bytearray(frames.tcp(trial, frames.SYN))
        shown[13] = frames.RST
        if frames.checksum(bytes(shown[2:])) == wanted:
            frame = frames.packet(trial, frames.TCP, bytes(shown))
            start = len(frame) - len(shown) + 2
            return struct.pack("=BBHHHH", VIRTIO_NET_HDR_F_NEEDS_CSUM, 0, 0, 0, start, 10) + frame
    raise AssertionError("there is one in every 65,536")


@pytest.fixture(params=["by-btf", "by-trimming"])
def reads_place(loaded: loader.Loaded, request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether gates read the place of a pending checksum, or find it by trimming."""
    if request.param == "by-btf":
        offers.need_features((features.KERNEL_READ,))
        yield True
        return
    layouts = loaded.map(map_specs.BUFFER_LAYOUT)
    before = layouts.get(bytes(4))
    assert before is not None
    layouts.set(bytes(4), bytes(abi.CBufferLayout()))
    yield False
    layouts.set(bytes(4), before)


def opens_tcp(frame: bytes) -> bool:
    at = 34 if frame[12:14] == b"\x08\x00" else 54
    return frame[at + 13] & (frames.SYN | frames.ACK) == frames.SYN


@pytest.mark.usefixtures("reads_place")
@VERSIONS
def test_frame_by_a_pair_that_is_rewritten_behind_the_gate_is_dropped(
    watched: PodState,  # noqa: F811
    loaded: loader.Loaded,
    version: int,
) -> None:
    switch_off_checksum_offload(watched.pod.interface)
    with links.pair() as (one, other), links.packet_socket(one) as sock, marked(loaded, other):
        sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        ends = ends_to(watched, version, links.mac_of(other))
        way = Way(other, ends.pod_mac, lambda frame: wire.send(sock, bytes(10) + frame))
        watched.set_mode(Mode.ENFORCE)
        wire.send(sock, disguised(ends))
        assert not any(map(opens_tcp, watched.arrived(end_by(way, ends))))


@pytest.mark.usefixtures("reads_place")
@VERSIONS
def test_frame_by_a_tun_and_a_pair_that_is_rewritten_behind_the_gate_is_dropped(
    pods_behind_pair: tuple[labs.LabPod, labs.LabPod],  # noqa: F811
    gates: Gates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    version: int,
) -> None:
    """The pair stamps it without having seen a socket."""
    switch_off_checksum_offload(pods_behind_pair[0].interface)
    with (
        as_the_agent_does(loaded, installation, *pods_behind_pair),
        guarded.guarded(gates, *pods_behind_pair) as made,
        links.tun(with_header=True) as (name, descriptor),
        marked(loaded, name),
    ):
        ends = ends_to(made, version, bytes(6))
        end_ends = dataclasses.replace(ends, port=guarded.END_PORT)

        def arrived() -> list[bytes]:
            packet = disguised(ends)
            start = int.from_bytes(packet[6:8], "little") - ETHERNET_LENGTH
            header = packet[:6] + start.to_bytes(2, "little") + packet[8:10]
            os.write(descriptor, header + packet[10 + ETHERNET_LENGTH :])
            return made.arrived(lambda end: os.write(descriptor, bytes(10) + end_packet(end)))

        def end_packet(end: bytes) -> bytes:
            frame = frames.packet(end_ends, frames.UDP, frames.udp(end_ends, end))
            return frame[ETHERNET_LENGTH:]

        assert any(map(opens_tcp, arrived()))
        made.set_mode(Mode.ENFORCE)
        assert not any(map(opens_tcp, arrived()))


@pytest.fixture
def bridged(
    lab: labs.Lab, gates: Gates, loaded: loader.Loaded, installation: pins.Pins
) -> Iterator[tuple[list[labs.LabPod], Gates]]:
    pods = [lab.add_pod(name, number, bridged=True) for number, name in enumerate("abc", 1)]
    with contextlib.closing(HostDevicePrograms(loaded, installation, Attachment.CLSACT)) as guards:
        guards.ensure_bridges({links.index_of(labs.BRIDGE)})
        yield pods, gates
        guards.ensure_bridges(set())


@contextlib.contextmanager
def flooded(bridged: tuple[list[labs.LabPod], Gates], *rules: Rule) -> Iterator[PodState]:
    """The middle pod of three, on a bridge that then forgets its ports; enforced."""
    pods, gates = bridged
    with guarded.guarded(gates, pods[1], pods[0], *rules) as made:
        made.set_mode(Mode.ENFORCE)
        traffic.forget_ports(labs.BRIDGE, pods)
        yield made


def bridge_ends(watched: PodState, version: int) -> frames.Ends:  # noqa: F811
    source = frames.address(traffic.NODE[version])
    pod = frames.address(traffic.address(watched.pod, version))
    return frames.Ends(source, pod, watched.mac)


def end_on_bridge(
    sock: socket.socket, ends: frames.Ends, header: bytes = b""
) -> Callable[[bytes], None]:
    to_end = dataclasses.replace(ends, port=guarded.END_PORT)
    return lambda end: wire.send(
        sock, header + frames.packet(to_end, frames.UDP, frames.udp(to_end, end))
    )


@VERSIONS
def test_flooded_frame_that_is_rewritten_behind_the_gate_is_dropped(
    bridged: tuple[list[labs.LabPod], Gates], version: int
) -> None:
    with flooded(bridged) as made, links.packet_socket(labs.BRIDGE) as sock:
        switch_off_checksum_offload(made.pod.interface)
        sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        ends = bridge_ends(made, version)
        wire.send(sock, disguised(ends))
        assert not any(map(opens_tcp, made.arrived(end_on_bridge(sock, ends, bytes(10)))))


@VERSIONS
def test_rule_for_the_kernel_admits_no_process_over_a_flooding_bridge(
    bridged: tuple[list[labs.LabPod], Gates], version: int
) -> None:
    with (
        flooded(bridged, Rule(SourceKind.KERNEL)) as made,
        syns.stream(traffic.family(version)) as sock,
    ):
        sock.connect_ex((traffic.address(made.pod, version), guarded.TCP_PORT))
        assert made.arrived() == []


@VERSIONS
def test_tagged_frame_of_a_packet_socket_on_a_bridge_is_dropped_before_there_are_copies(
    bridged: tuple[list[labs.LabPod], Gates],
    loaded: loader.Loaded,
    installation: pins.Pins,
    version: int,
) -> None:
    """A bridge that separates VLANs sends them on without the tag: gates could read them then."""
    pods, gates = bridged
    with (
        guarded.guarded(gates, pods[1], pods[0]) as made,
        programs(loaded, installation) as devices,
        links.packet_socket(labs.BRIDGE) as sock,
    ):
        traffic.forget_ports(labs.BRIDGE, pods)
        ends = bridge_ends(made, version)
        plain = frames.segment(ends, frames.ACK | frames.PSH, data=b"injected")
        frame = plain[:12] + struct.pack("!HH", frames.ETHERTYPE_VLAN, 1) + plain[12:]
        devices.ensure_bridges(set())
        wire.send(sock, frame)
        assert any(b"injected" in seen for seen in made.arrived(end_on_bridge(sock, ends)))
        devices.ensure_bridges({links.index_of(labs.BRIDGE)})
        made.set_mode(Mode.ENFORCE)
        counting = Counting(gates)
        wire.send(sock, frame)
        assert not any(b"injected" in seen for seen in made.arrived(end_on_bridge(sock, ends)))
        assert counting.moved() == UNREADABLE
        assert made.moved() == {}
        assert not UNREADABLE.keys() & made.moved_at_neighbour().keys()


@VERSIONS
def test_frame_that_would_be_dropped_in_audit_arrives_whole(
    watched: PodState,  # noqa: F811
    loaded: loader.Loaded,
    reads_place: bool,
    version: int,
) -> None:
    """In audit it is not trimmed, so it counts only where the checksum's place can be read."""
    switch_off_checksum_offload(watched.pod.interface)
    with links.pair() as (one, other), links.packet_socket(one) as sock, marked(loaded, other):
        sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        ends = ends_to(watched, version, links.mac_of(other))
        way = Way(other, ends.pod_mac, lambda frame: wire.send(sock, bytes(10) + frame))
        lengths = []
        for mode in (Mode.OFF, Mode.AUDIT):
            watched.set_mode(mode)
            wire.send(sock, disguised(ends))
            lengths.append([len(frame) for frame in watched.arrived(end_by(way, ends))])
        counts = watched.moved()
    assert lengths[0]
    assert lengths[0] == lengths[1]
    assert counts.get((Verdict.WOULD_DROP, Reason.UNPARSABLE), 0) == reads_place
