"""A packet encapsulated for a host tunnel comes out as forwarded, so it must not reach it."""

import contextlib
import dataclasses
import errno
import itertools
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, loader, pins
from bpf.gates import Attachment, Gates
from bpf.hooks import Hooks
from bpf.host_devices import HostDevicePrograms
from bpf.node_config import NodeConfig
from bpf.verdicts import Mode, Reason, Verdict
from probes.netns import netns_cookie
from tests.kernel import frames, guarded, links, offers, syns, traffic, tunnelled, uring, wire
from tests.kernel.counting import Counting
from tests.kernel.guarded import PodState

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
OUTER = pytest.mark.parametrize("outer", [4, 6], ids=["over-ipv4", "over-ipv6"])
TUNNEL_DROPPED = (Verdict.DROP, Reason.TUNNEL)
NOBODY = 65534
_numbers = itertools.count(32000)


class Tunnelled:
    """A pod, and a tunnel of the node's by which frames for the pod may come."""

    def __init__(
        self, watched: PodState, loaded: loader.Loaded, guards: HostDevicePrograms, gates: Gates
    ):
        self.watched = watched
        self._config = NodeConfig(loaded)
        self._guards = guards
        self._counting = Counting(gates)

    def guard(self, *, is_guarded: bool) -> None:
        """As the agent does where it finds a tunnel."""
        self._config.set_tunnel_ports([tunnelled.VXLAN_PORT] if is_guarded else [])
        self._guards.ensure_tunnels(are_guarded=is_guarded)
        self._counting.moved()

    def drops(self) -> dict[tuple[Verdict, Reason], int]:
        return self._counting.moved()

    def inner(self, version: int, payload: bytes | None = None) -> bytes:
        """A SYN for the pod, or a datagram to the port of end markers."""
        source = frames.address(syns.STRANGER[version])
        pod = frames.address(traffic.address(self.watched.pod, version))
        ends = frames.Ends(source, pod, tunnelled.MAC)
        if payload is None:
            return frames.segment(ends, frames.SYN)
        to_end = dataclasses.replace(ends, port=guarded.END_PORT)
        return frames.packet(to_end, frames.UDP, frames.udp(to_end, payload))


@pytest.fixture
def tunnel(
    lab: labs.Lab, gates: Gates, loaded: loader.Loaded, installation: pins.Pins
) -> Iterator[Tunnelled]:
    mount = cgroup2_mount()
    assert mount is not None
    with contextlib.ExitStack() as stack:
        pod, neighbour = lab.add_pod("web", 1), lab.add_pod("neighbour", 2)
        watched = stack.enter_context(guarded.guarded(gates, pod, neighbour))
        for local in traffic.NODE.values():
            port, network = tunnelled.VXLAN_PORT, tunnelled.NETWORK
            stack.enter_context(links.vxlan(tunnelled.MAC, port, network, local))
        NodeConfig(loaded).set_netns(netns_cookie())
        stack.callback(loaded.map(abi.CONFIG).set, bytes(4), bytes(abi.CConfig()))
        hooks = Hooks(loaded, installation, mount)
        stack.callback(hooks.detach)
        hooks.attach()
        guards = stack.enter_context(
            contextlib.closing(HostDevicePrograms(loaded, installation, Attachment.CLSACT))
        )
        stack.callback(guards.ensure_tunnels, are_guarded=False)
        watched.set_mode(Mode.ENFORCE)
        yield Tunnelled(watched, loaded, guards, gates)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """As the user nobody, without any capability."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def node_address(version: int) -> tuple[str, int]:
    return traffic.NODE[version], tunnelled.VXLAN_PORT


def send_datagram(outer: int, inner: bytes) -> int:
    with unprivileged(), syns.datagram(traffic.family(outer)) as sock:
        return code_of(lambda: sock.sendto(tunnelled.wrap(inner), node_address(outer)))


def send_connected(outer: int, inner: bytes) -> int:
    with unprivileged(), syns.datagram(traffic.family(outer)) as sock:
        code = code_of(lambda: sock.connect(node_address(outer)))
        return code or code_of(lambda: sock.send(tunnelled.wrap(inner)))


def send_mapped(outer: int, inner: bytes) -> int:
    """By way of an IPv6 socket, which over IPv6 is nothing new."""
    address, port = node_address(outer)
    to = f"::ffff:{address}" if outer == 4 else address
    with unprivileged(), syns.datagram(socket.AF_INET6) as sock:
        return code_of(lambda: sock.sendto(tunnelled.wrap(inner), (to, port)))


def send_by_ring(outer: int, inner: bytes) -> int:
    with unprivileged(), uring.ring() as ring, syns.datagram(traffic.family(outer)) as sock:
        to = uring.sockaddr(*node_address(outer))
        return max(0, -ring.send_to(sock, tunnelled.wrap(inner), to))


def code_of(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.parametrize(
    "send", [send_datagram, send_connected, send_mapped, send_by_ring], ids=lambda s: s.__name__
)
@OUTER
@VERSIONS
def test_datagram_of_an_unprivileged_process_is_rejected(
    tunnel: Tunnelled, send: Callable[[int, bytes], int], outer: int, version: int
) -> None:
    offers.need_netns_cookie()
    assert send(outer, tunnel.inner(version)) == 0
    assert tunnel.watched.arrived(lambda end: send(outer, tunnel.inner(version, end)))

    tunnel.guard(is_guarded=True)
    assert send(outer, tunnel.inner(version)) == errno.EPERM
    assert tunnel.watched.arrived() == []
    assert tunnel.drops() == {TUNNEL_DROPPED: 1}
    assert tunnel.watched.moved() == {}


def outer_ends(outer: int) -> frames.Ends:
    """To the node; from elsewhere, since what comes in from its own address is a martian."""
    source, node = syns.STRANGER[outer], traffic.NODE[outer]
    return frames.Ends(
        frames.address(source), frames.address(node), bytes(6), 31000, tunnelled.VXLAN_PORT
    )


def send_raw(outer: int, inner: bytes) -> None:
    """The kernel sees no UDP socket."""
    ends = outer_ends(outer)
    whole = syns.packet(ends, frames.UDP, tunnelled.udp(ends, inner))
    target = syns.Target(traffic.NODE[outer], "lo", 0, tunnelled.VXLAN_PORT)
    syns.send_whole(target, whole)


def send_frame(outer: int, inner: bytes) -> None:
    ends = outer_ends(outer)
    to_loopback(frames.packet(ends, frames.UDP, tunnelled.udp(ends, inner)))


def send_fragments(outer: int, inner: bytes) -> None:
    """In two, the first of which has no more than the ports; no two datagrams alike."""
    ends = dataclasses.replace(outer_ends(outer), source_port=next(_numbers))
    payload = tunnelled.udp(ends, inner)
    for offset, part in ((0, payload[:8]), (8, payload[8:])):
        is_first = offset == 0
        if outer == 4:
            bits = frames.MORE_FRAGMENTS if is_first else offset // 8
            whole = frames.ipv4(ends, frames.UDP, part, fragment=bits)
            to_loopback(frames.ethernet(ends, frames.ETHERTYPE_IPV4, whole))
        else:
            number = ends.source_port
            header = frames.fragment_header(
                frames.UDP, offset, more=is_first, identification=number
            )
            whole = frames.ipv6(ends, frames.FRAGMENT, header + part)
            to_loopback(frames.ethernet(ends, frames.ETHERTYPE_IPV6, whole))


def to_loopback(frame: bytes) -> None:
    with links.packet_socket("lo") as sock:
        wire.send(sock, frame)


PRIVILEGED = [send_raw, send_frame, send_fragments]


@pytest.mark.parametrize("send", PRIVILEGED, ids=lambda s: s.__name__)
@OUTER
@VERSIONS
def test_wrapped_packet_of_a_raw_or_packet_socket_is_dropped(
    tunnel: Tunnelled, send: Callable[[int, bytes], None], outer: int, version: int
) -> None:
    send(outer, tunnel.inner(version))
    assert tunnel.watched.arrived(lambda end: send_frame(outer, tunnel.inner(version, end)))

    tunnel.guard(is_guarded=True)
    send(outer, tunnel.inner(version))
    assert tunnel.watched.arrived(end_by_loopback(tunnel.watched)) == []
    assert tunnel.drops() == {TUNNEL_DROPPED: 1}
    assert tunnel.watched.moved() == {}


def end_by_loopback(watched: PodState) -> Callable[[bytes], None]:
    """As long a way as the tunnel's: it comes in by the loopback and is routed to the pod."""
    pod = frames.address(watched.pod.ipv4)
    node = frames.address(syns.STRANGER[4])
    ends = frames.Ends(node, pod, bytes(6), 31000, guarded.END_PORT)
    return lambda end: to_loopback(frames.packet(ends, frames.UDP, frames.udp(ends, end)))
