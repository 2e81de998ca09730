"""Another node of the cluster, by whose tunnel its pods reach those of this node.

It is a namespace behind an uplink. The tunnel is its only way to the pods of this node, and their
only way to it.
"""

import asyncio
import contextlib
import dataclasses
import os
import select
import threading
from collections.abc import Iterable, Iterator

from agent.gates.host_devices import programs_for
from agent.lab import lab as labs
from agent.lab.lab import LabPod
from agent.linux import rtnetlink, tunnels, udp_listeners
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, loader, map_specs, pins
from bpf.hooks import Hooks
from bpf.node_config import NodeConfig
from probes.netns import netns_cookie
from tests.kernel import conversations, links, traffic
from tests.kernel.test_bypass_reentry import programs

NAME = "tunnel-pg"
"""Of the tunnel's interface, on both nodes."""

ROUTED = {4: "198.18.64.7", 6: "fd00:18:64::7"}
"""A pod of the other node that this node has routes to."""
BRIDGED = {4: "198.18.2.200", 6: "fd00:18:0:2::c8"}
"""One in the same subnet as the pods of this node's bridge."""

BOTH = (4, 6)
_MTU = 1500  # of the pods
_UPLINK_MTU = 2000  # room for the headers of any tunnel
_OWN_MAC, _OTHER_MAC = "02:00:00:00:00:42", "02:00:00:00:00:43"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tunnel between IPv4 or IPv6 addresses. options: of `ip link add`, for the end at
    {local}; is_ethernet: whether packets in it have an Ethernet header."""

    name: str
    outer: int
    options: str
    is_ethernet: bool = True

    def __str__(self) -> str:
        return f"{self.name}-over-ipv{self.outer}"


def add(lab: labs.Lab) -> LabPod:
    """The other node; its sockets get the address of its pod when there is a tunnel."""
    other = lab.add_pod("othernode", 9)
    links.ip(f"link set {other.interface} mtu {_UPLINK_MTU}")
    links.ip_inside(
        other,
        f"link set eth0 mtu {_UPLINK_MTU}",
        *(f"route del default via {node}" for node in traffic.NODE.values()),
    )
    return other


@contextlib.contextmanager
def tunnel(other: LabPod, kind: Kind) -> Iterator[None]:
    """Both ends of a tunnel, without routes."""
    own, its = traffic.NODE[kind.outer], traffic.address(other, kind.outer)
    with links.made(NAME, *_commands(kind, _OWN_MAC, own, its)):
        links.ip_inside(other, *_commands(kind, _OTHER_MAC, its, own))
        yield


def _commands(kind: Kind, mac: str, local: str, remote: str) -> list[str]:
    address = f"address {mac} " if kind.is_ethernet else ""
    options = kind.options.format(local=local, remote=remote)
    return [
        f"link add {NAME} {address}mtu {_MTU} type {options}",
        f"link set {NAME} up",
    ]


def route(
    other: LabPod,
    pods: Iterable[LabPod],
    *,
    device: str = NAME,
    families: Iterable[int] = BOTH,
    is_ethernet: bool = False,
) -> dict[int, str]:
    """Routes between the pods of both nodes by the interface `device` on each, with permanent
    neighbours as flannel writes them. The addresses of the other node's pod."""
    for version in families:
        its = ROUTED[version]
        prefix = f"{its}/32" if version == 4 else f"{its}/128 nodad"
        links.ip(f"route add {its} dev {device}")
        links.ip_inside(other, f"address add {prefix} dev {device}")
        if is_ethernet:
            links.ip(f"neighbour add {its} lladdr {_OTHER_MAC} dev {device}")
        for pod in pods:
            own = traffic.address(pod, version)
            links.ip_inside(other, f"route add {own} dev {device} src {its}")
            if is_ethernet:
                links.ip_inside(other, f"neighbour add {own} lladdr {_OWN_MAC} dev {device}")
    return ROUTED


def join_bridge(other: LabPod) -> dict[int, str]:
    """The tunnel is a port of the pods' bridge, and the other node's pod in their subnet. Its
    addresses."""
    links.ip(f"link set {NAME} master {labs.BRIDGE}")
    links.wait_for_port(NAME)
    links.ip_inside(
        other,
        f"address add {BRIDGED[4]}/24 dev {NAME}",
        f"address add {BRIDGED[6]}/64 nodad dev {NAME}",
    )
    return BRIDGED


@contextlib.contextmanager
def tun_to(other: LabPod, pods: Iterable[LabPod]) -> Iterator[dict[int, str]]:
    """A tun on each node, and a thread that passes packets from one to the other, as flannel's udp
    backend does. The addresses of the other node's pod."""
    with (
        links.tun() as (name, own),
        links.tun_inside(other) as its,
        _passed_on(own, its),
    ):
        yield route(other, pods, device=name)


@contextlib.contextmanager
def _passed_on(one: int, other: int) -> Iterator[None]:
    stopping = os.eventfd(0)

    def work() -> None:
        while True:
            readable, _, _ = select.select([one, other, stopping], [], [])
            if stopping in readable:
                return
            for source, target in ((one, other), (other, one)):
                if source in readable:
                    os.write(target, os.read(source, 1 << 16))

    thread = threading.Thread(target=work, name="flannel")
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(stopping, 1)
        thread.join()
        os.close(stopping)


@contextlib.contextmanager
def protected(
    loaded: loader.Loaded, installation: pins.Pins, other: LabPod, pods: Iterable[LabPod]
) -> Iterator[None]:
    """What the agent attaches besides gates, before pods are enforced: programs on host devices, of
    which the interface to the other node is the uplink, and the hooks."""
    mount = cgroup2_mount()
    assert mount is not None
    config = NodeConfig(loaded)
    with contextlib.ExitStack() as stack:
        devices = stack.enter_context(programs(loaded, installation))
        stack.callback(loaded.map(map_specs.CONFIG).set, bytes(4), bytes(abi.CConfig()))
        found = asyncio.run(rtnetlink.read())
        gated = {pod.ifindex for pod in pods}
        needed = programs_for(found, gated=gated, enforced=gated, uplinks={other.ifindex})
        assert other.ifindex in needed.uplinks
        devices.ensure_hand_made(set(needed.hand_made))
        devices.ensure_bridges(set(needed.bridges))
        devices.ensure_devices(set(needed.devices))
        devices.ensure_uplinks(set(needed.uplinks))
        guarded = tunnels.find_tunnels(found, udp_listeners.read())
        stack.callback(devices.ensure_tunnels, are_guarded=False)
        devices.ensure_tunnels(are_guarded=guarded.has_any)
        config.set_tunnel_ports(guarded.udp_ports)
        config.set_netns(netns_cookie())
        hooks = Hooks(loaded, installation, mount)
        stack.callback(hooks.detach)
        hooks.attach()
        yield


def talk(other: LabPod, pod: LabPod, remote: str) -> None:
    """The pod `remote` of the other node talks to the pod, and the pod to it: TCP, datagrams short
    and in fragments, pings."""
    version = conversations.version_of(remote)
    with conversations.served_by(pod.open_socket) as serving:
        conversations.exchange_all(other, serving, traffic.address(pod, version))
    with conversations.served_by(other.open_socket) as serving:
        conversations.exchange_all(pod, serving, remote)
