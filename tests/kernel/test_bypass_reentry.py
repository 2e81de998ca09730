"""Frames of the host that reenter by interfaces of the host: they count as sent by the host.

Each path is shown to work while its interface is not marked, so that the mark alone closes it.
"""

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator

import pyroute2
import pytest

from agent.gates.injectable import can_inject
from agent.lab import lab as labs
from agent.linux.rtnetlink import of_message
from bpf import injectable, loader
from bpf.gates import Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, links, syns, traffic, wire
from tests.kernel.guarded import PodState

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
FLAGS = pytest.mark.parametrize("flags", [frames.SYN, frames.SYN | frames.PSH], ids=["syn", "psh"])
NODE_DROPPED = (Verdict.DROP, Reason.NODE)


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """Into the node again. `send` takes an Ethernet frame to `mac`; it comes in by `interface`."""

    interface: str
    mac: bytes
    send: Callable[[bytes], None]


@contextlib.contextmanager
def _by_pair() -> Iterator[Way]:
    with links.pair() as (one, other), links.packet_socket(one) as sock:
        yield Way(other, links.mac_of(other), lambda frame: wire.send(sock, frame))


@contextlib.contextmanager
def _by_macvlan() -> Iterator[Way]:
    with links.macvlans() as (one, other), links.packet_socket(one) as sock:
        yield Way(other, links.mac_of(other), lambda frame: wire.send(sock, frame))


@contextlib.contextmanager
def _by_tun() -> Iterator[Way]:
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
        yield Way("ifb-pg", links.mac_of("ifb-pg"), lambda frame: wire.send(sock, frame))


def _write(descriptor: int, packet: bytes) -> None:
    assert os.write(descriptor, packet) == len(packet)


WAYS = pytest.mark.parametrize(
    "way",
    [_by_pair, _by_macvlan, _by_tun, _by_redirect],
    ids=["pair", "macvlan", "tun", "redirect"],
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


@WAYS
@VERSIONS
@FLAGS
def test_frame_that_reenters_counts_as_of_the_host(
    watched: PodState,
    loaded: loader.Loaded,
    way: Callable[[], contextlib.AbstractContextManager[Way]],
    version: int,
    flags: int,
) -> None:
    with way() as by:
        ends = ends_to(watched, version, by.mac)
        watched.set_mode(Mode.ENFORCE)
        by.send(frames.segment(ends, flags))
        assert watched.arrived(end_by(by, ends))  # forwarded, according to the gate
        assert watched.moved() == {}
        with marked(loaded, by.interface):
            by.send(frames.segment(ends, flags))
            assert watched.arrived(end_by(by, ends)) == []
            assert watched.moved() == {NODE_DROPPED: 1}
            by.send(frames.packet(ends, frames.UDP, frames.udp(ends, b"datagram")))
            assert watched.arrived(end_by(by, ends)) == []
            assert watched.moved() == {NODE_DROPPED: 1}
    assert watched.moved_at_neighbour() == {}


@WAYS
def test_agent_marks_the_interface_and_no_pod_s(
    lab: labs.Lab, way: Callable[[], contextlib.AbstractContextManager[Way]]
) -> None:
    pods = [lab.add_pod("routed", 1), lab.add_pod("bridged", 2, bridged=True)]
    with way() as by, pyroute2.IPRoute() as netlink:
        found = map(of_message, netlink.get_links())
        injecting = {link.index for link in found if can_inject(link)}
        assert links.index_of(by.interface) in injecting
        assert not injecting & {pod.ifindex for pod in pods}
        assert links.index_of(labs.BRIDGE) not in injecting
