"""Frames of the host that reenter by interfaces of the host: they count as sent by the host.

Each path is shown to work without the program that stamps them, or without the mark of the
interface, so that this alone closes it. The loopback, pairs, macvlan and bridges that flood are in
tests/attacks.
"""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from agent.gates.host_devices import programs_for
from agent.lab import lab as labs
from agent.linux import rtnetlink
from bpf import injectable, loader, pins
from bpf.gates import Attachment, Gates
from bpf.host_devices import HostDevicePrograms
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, links, syns, traffic, wire
from tests.kernel.guarded import PodState

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
SYNS = pytest.mark.parametrize("flags", [frames.SYN, frames.SYN | frames.PSH], ids=["syn", "psh"])
NODE_DROPPED = (Verdict.DROP, Reason.NODE)


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """Into the node again. `send` takes an Ethernet frame to `mac`; it comes in by `interface`.

    leaves_by: the interface where it is stamped; None where only a mark on `interface` helps.
    """

    interface: str
    mac: bytes
    send: Callable[[bytes], None]
    leaves_by: str | None = None


MakeWay = Callable[[], contextlib.AbstractContextManager[Way]]


@contextlib.contextmanager
def _by_macvtap() -> Iterator[Way]:
    """As a virtual machine does; the other interface above the same one receives it."""
    with links.macvlans() as (_, other), links.macvtap("lower0") as (name, descriptor):
        yield Way(other, links.mac_of(other), lambda frame: _write_to_tap(descriptor, frame), name)


@contextlib.contextmanager
def _by_stacked_macvtap() -> Iterator[Way]:
    """On an end of a pair: without the macvtap's own program."""
    with links.pair() as (one, other), links.macvtap(one) as (_, descriptor):
        yield Way(other, links.mac_of(other), lambda frame: _write_to_tap(descriptor, frame), one)


@contextlib.contextmanager
def tun_way() -> Iterator[Way]:
    """Which takes IP packets, so the frame loses its Ethernet header."""
    with links.tun() as (name, descriptor):
        yield Way(name, bytes(6), lambda frame: _write(descriptor, frame[14:]))


@contextlib.contextmanager
def _by_redirect() -> Iterator[Way]:
    """A foreign filter sends on to an ifb interface what leaves by another."""
    redirect = "action mirred ingress redirect dev ifb-pg"
    with (
        links.made("ifb-pg", "link add ifb-pg type ifb", "link set ifb-pg up"),
        links.pair() as (one, _),
        links.packet_socket(one) as sock,
    ):
        for command in (
            f"tc qdisc add dev {one} clsact",
            f"tc filter add dev {one} egress u32 match u32 0 0 {redirect}",
        ):
            subprocess.run(command.split(), check=True)
        yield Way("ifb-pg", links.mac_of("ifb-pg"), lambda frame: wire.send(sock, frame), one)


@contextlib.contextmanager
def _by_stack() -> Iterator[Way]:
    """Interfaces stacked on both ends of a pair: the sender's has no program of its own."""
    with links.pair() as (one, other):
        for end in (one, other):
            links.ip(
                f"link add link {end} name {end}-up type macvlan mode private",
                f"link set {end}-up up",
            )
        with links.packet_socket(f"{one}-up") as sock:
            mac = links.mac_of(f"{other}-up")
            yield Way(f"{other}-up", mac, lambda frame: wire.send(sock, frame), one)


@contextlib.contextmanager
def _by_bridge() -> Iterator[Way]:
    """The pair's other end is a port, so the frame comes in by the bridge."""
    with (
        links.made("br-pg", "link add br-pg type bridge", "link set br-pg up"),
        links.pair() as (one, other),
        links.packet_socket(one) as sock,
    ):
        links.ip(f"link set {other} master br-pg")
        links.wait_for_port(other)
        yield Way("br-pg", links.mac_of("br-pg"), lambda frame: wire.send(sock, frame), one)


@contextlib.contextmanager
def _by_two_bridges() -> Iterator[Way]:
    """Two bridges joined by a pair; a socket on the first."""
    with (
        links.made("br-pg", "link add br-pg type bridge", "link set br-pg up"),
        links.made("br2-pg", "link add br2-pg type bridge", "link set br2-pg up"),
        links.pair() as (one, other),
        links.packet_socket("br-pg") as sock,
    ):
        links.ip(f"link set {one} master br-pg", f"link set {other} master br2-pg")
        for port in (one, other):
            links.wait_for_port(port)
        yield Way("br2-pg", links.mac_of("br2-pg"), lambda frame: wire.send(sock, frame), one)


def _write(descriptor: int, packet: bytes) -> None:
    assert os.write(descriptor, packet) == len(packet)


def _write_to_tap(descriptor: int, frame: bytes) -> None:
    """Behind an empty header of virtio."""
    _write(descriptor, bytes(10) + frame)


STAMPED = pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=way.__name__.removeprefix("_by_").replace("_", "-"))
        for way in (
            *(_by_redirect, _by_stack, _by_bridge, _by_two_bridges),
            *(_by_macvtap, _by_stacked_macvtap),
        )
    ],
)


@pytest.fixture
def watched(lab: labs.Lab, gates: Gates) -> Iterator[PodState]:
    with guarded.guarded(gates, lab.add_pod("web", 1), lab.add_pod("neighbour", 2)) as made:
        yield made


@contextlib.contextmanager
def marked(loaded: loader.Loaded, interface: str) -> Iterator[None]:
    marks, ifindex = injectable.InjectableMap(loaded), links.index_of(interface)
    marks.mark(ifindex, is_node_sent=True)
    try:
        yield
    finally:
        marks.mark(ifindex, is_node_sent=False)


def ends_to(watched: PodState, version: int, mac: bytes) -> frames.Ends:
    """From an unused address, in a frame to the host, which routes it to the pod."""
    source = frames.address(syns.STRANGER[version])
    return frames.Ends(source, frames.address(traffic.address(watched.pod, version)), mac)


def end_by(way: Way, ends: frames.Ends) -> Callable[[bytes], None]:
    to_end = dataclasses.replace(ends, port=guarded.END_PORT)
    return lambda end: way.send(frames.packet(to_end, frames.UDP, frames.udp(to_end, end)))


@contextlib.contextmanager
def programs(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[HostDevicePrograms]:
    """Programs of host devices; all detached at the end."""
    with contextlib.closing(HostDevicePrograms(loaded, installation, Attachment.CLSACT)) as made:
        try:
            yield made
        finally:
            for ensure in (made.ensure_bridges, made.ensure_devices):
                ensure(set())
            for ensure in (made.ensure_uplinks, made.ensure_bare_devices):
                ensure(set())
            for ensure in (made.ensure_hand_made, made.ensure_spoofed):
                ensure(set())


@STAMPED
@VERSIONS
@pytest.mark.parametrize("flags", [frames.SYN, frames.ACK], ids=["syn", "ack"])
def test_frame_that_reenters_counts_as_of_the_host(
    watched: PodState,
    loaded: loader.Loaded,
    installation: pins.Pins,
    way: MakeWay,
    version: int,
    flags: int,
) -> None:
    expect_stamped(watched, loaded, installation, way, version=version, flags=flags)


def expect_stamped(
    watched: PodState,
    loaded: loader.Loaded,
    installation: pins.Pins,
    way: MakeWay,
    *,
    version: int,
    flags: int,
) -> None:
    """Evaluated where it leaves, it does not come in again."""
    with programs(loaded, installation) as devices, way() as by:
        ends = ends_to(watched, version, by.mac)
        watched.set_mode(Mode.ENFORCE)
        by.send(frames.segment(ends, flags))
        assert watched.arrived(end_by(by, ends))  # forwarded, according to the gate
        assert watched.moved() == {}

        assert by.leaves_by is not None
        devices.ensure_devices({links.index_of(by.leaves_by)})
        by.send(frames.segment(ends, flags))
        by.send(frames.packet(ends, frames.UDP, frames.udp(ends, b"datagram")))
        assert watched.arrived(end_by(by, ends)) == []
        assert watched.moved() == {NODE_DROPPED: 2}
    assert watched.moved_at_neighbour() == {}


@VERSIONS
@SYNS
def test_packet_from_a_tun_counts_as_of_the_host(
    watched: PodState, loaded: loader.Loaded, version: int, flags: int
) -> None:
    with tun_way() as by:
        ends = ends_to(watched, version, by.mac)
        watched.set_mode(Mode.ENFORCE)
        by.send(frames.segment(ends, flags))
        assert watched.arrived(end_by(by, ends))
        assert watched.moved() == {}
        with marked(loaded, by.interface):
            by.send(frames.segment(ends, flags))
            by.send(frames.packet(ends, frames.UDP, frames.udp(ends, b"datagram")))
            assert watched.arrived(end_by(by, ends)) == []
            assert watched.moved() == {NODE_DROPPED: 2}
    assert watched.moved_at_neighbour() == {}


@STAMPED
def test_agent_stamps_where_it_leaves_and_marks_no_pod_s(lab: labs.Lab, way: MakeWay) -> None:
    pods = [lab.add_pod("routed", 1), lab.add_pod("bridged", 2, bridged=True)]
    with way() as by:
        found = asyncio.run(rtnetlink.read())
        own = {pod.ifindex for pod in pods}
        needed = programs_for(found, gated=own, enforced=own)
        assert by.leaves_by is not None
        assert links.index_of(by.leaves_by) in needed.devices
        assert links.index_of("lo") in needed.hand_made
        assert links.index_of(labs.BRIDGE) in needed.bridges
        everywhere = needed.devices | needed.hand_made | needed.bridges
        assert not everywhere & {pod.ifindex for pod in pods}
