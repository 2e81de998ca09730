"""A packet encapsulated for a tunnel of the host, of each kind that the kernel has as a module.

Each path is shown to work before the host's tunnels are found, as the agent finds them.
"""

import asyncio
import contextlib
import dataclasses
import errno
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.linux import rtnetlink, tunnels, udp_listeners
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, loader, map_specs, pins
from bpf.gates import Attachment, Gates
from bpf.hooks import Hooks
from bpf.host_devices import HostDevicePrograms
from bpf.node_config import NodeConfig
from bpf.verdicts import Mode, Reason, Verdict
from probes.netns import netns_cookie
from tests.kernel import frames, guarded, links, offers, syns, traffic, tunnelled, wire
from tests.kernel.counting import Counting
from tests.kernel.devices import tunnel_kinds
from tests.kernel.devices.tunnel_kinds import Kind
from tests.kernel.guarded import PodState
from tests.kernel.tunnelled import code_of, end_by_loopback, unprivileged

pytestmark = pytest.mark.kernel

MODES = pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.STRICT], ids=["enforce", "strict"])
TUNNEL_DROPPED = (Verdict.DROP, Reason.TUNNEL)
UDP_KINDS = [kind for kind in tunnel_kinds.KINDS if kind.port is not None]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A pod, and the programs that protect the node's tunnels."""

    watched: PodState
    config: NodeConfig
    guards: HostDevicePrograms
    counting: Counting

    def guard(self, kind: Kind) -> None:
        """As the agent does where it finds tunnels."""
        found = asyncio.run(rtnetlink.read())
        ports = tunnels.find_tunnels(found, udp_listeners.read())
        assert ports.has_any
        assert kind.port is None or kind.port in ports.udp_ports
        self.config.set_tunnel_ports(ports.udp_ports)
        self.guards.ensure_tunnels(are_guarded=ports.has_any)
        self.counting.moved()

    def inner(self, version: int, payload: bytes | None = None) -> bytes:
        """A SYN for the pod, or a datagram to the port of end markers."""
        pod = frames.address(traffic.address(self.watched.pod, version))
        ends = frames.Ends(frames.address(syns.STRANGER[version]), pod, tunnelled.MAC)
        if payload is None:
            return frames.segment(ends, frames.SYN)
        to_end = dataclasses.replace(ends, port=guarded.END_PORT)
        return frames.packet(to_end, frames.UDP, frames.udp(to_end, payload))


@pytest.fixture
def node(
    lab: labs.Lab, gates: Gates, loaded: loader.Loaded, installation: pins.Pins
) -> Iterator[Node]:
    mount = cgroup2_mount()
    assert mount is not None
    with contextlib.ExitStack() as stack:
        pod, neighbour = lab.add_pod("web", 1), lab.add_pod("neighbour", 2)
        watched = stack.enter_context(guarded.guarded(gates, pod, neighbour))
        peers = [
            f"address {{}} {address}/{bits} dev lo"
            for address, bits in ((tunnel_kinds.PEER[4], 32), (tunnel_kinds.PEER[6], 128))
        ]
        links.ip(*(peer.format("add") for peer in peers))
        stack.callback(links.ip, *(peer.format("del") for peer in peers))
        NodeConfig(loaded).set_netns(netns_cookie())
        stack.callback(loaded.map(map_specs.CONFIG).set, bytes(4), bytes(abi.CConfig()))
        hooks = Hooks(loaded, installation, mount)
        stack.callback(hooks.detach)
        hooks.attach()
        guards = stack.enter_context(
            contextlib.closing(HostDevicePrograms(loaded, installation, Attachment.CLSACT))
        )
        stack.callback(guards.ensure_tunnels, are_guarded=False)
        yield Node(watched, NodeConfig(loaded), guards, Counting(gates))


def send_datagram(kind: Kind, inner: bytes) -> int:
    """By an unprivileged process; the error's number."""
    assert kind.port is not None
    with syns.datagram(traffic.family(kind.outer)) as sock:
        if kind.name == "l2tp-udp":  # it accepts packets of its peer only
            sock.bind((tunnel_kinds.PEER[kind.outer], kind.port))
        to = (traffic.NODE[kind.outer], kind.port)
        with unprivileged():
            return code_of(lambda: sock.sendto(kind.wrap(kind.inner, inner), to))


def send_frame(kind: Kind, inner: bytes) -> None:
    with links.packet_socket("lo") as sock:
        wire.send(sock, tunnel_kinds.outer_packet(kind, inner))


@pytest.mark.parametrize("kind", UDP_KINDS, ids=str)
@MODES
def test_datagram_of_an_unprivileged_process_is_rejected(
    node: Node, kind: Kind, mode: Mode
) -> None:
    offers.need_netns_cookie()
    with kind.make(kind.outer, kind.inner):
        node.watched.set_mode(mode)
        assert send_datagram(kind, node.inner(kind.inner)) == 0
        assert node.watched.arrived(lambda end: send_datagram(kind, node.inner(kind.inner, end)))

        node.guard(kind)
        assert send_datagram(kind, node.inner(kind.inner)) == errno.EPERM
        assert node.watched.arrived(end_by_loopback(node.watched)) == []
        assert node.counting.moved().keys() == {TUNNEL_DROPPED}


@pytest.mark.parametrize("kind", tunnel_kinds.KINDS, ids=str)
@MODES
def test_wrapped_packet_of_a_packet_socket_is_dropped(node: Node, kind: Kind, mode: Mode) -> None:
    with kind.make(kind.outer, kind.inner), links.sysctl("net/ipv4/conf/lo/accept_local", "1"):
        node.watched.set_mode(mode)
        send_frame(kind, node.inner(kind.inner))
        assert node.watched.arrived(lambda end: send_frame(kind, node.inner(kind.inner, end)))

        node.guard(kind)
        send_frame(kind, node.inner(kind.inner))
        assert node.watched.arrived(end_by_loopback(node.watched)) == []
        # The kernel's own multicast by the tunnel, whose peer is the node, may be counted as well.
        assert node.counting.moved().keys() == {TUNNEL_DROPPED}
