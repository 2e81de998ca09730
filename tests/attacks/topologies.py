"""The networks of a node in which each attack is tried.

A topology is made before the agent starts. Its ways are those by which a packet of a process of the
node may come in again, as if another machine had sent it.
"""

import contextlib
import dataclasses
import functools
import os
import socket
import subprocess
from collections.abc import Callable, Iterator

from agent.lab import lab as labs
from agent.lab.lab import Lab, LabPod
from tests.attacks.site import Site, Way, mac_inside
from tests.kernel import frames, links, traffic, tunnelled
from tests.nodes import node

_TUN_BYTES = 1 << 16
UNDERLAY_PORT = 4790
"""Of the uplink's tunnel, over both IP versions."""
_OVERLAY = {4: ("198.18.78.1", "198.18.78.2"), 6: ("fd00:18:78::1", "fd00:18:78::2")}
_BITS = {4: 24, 6: 64}
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}
"""An address that other machines route to this node."""


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """make: the node's network, until the block ends. ways: the names of its ways."""

    name: str
    what: str
    ways: tuple[str, ...]
    make: Callable[[Lab], contextlib.AbstractContextManager[Site]]

    def __str__(self) -> str:
        return self.name


@contextlib.contextmanager
def _site(lab: Lab, *ways: Way, is_bridged: bool) -> Iterator[Site]:
    pods = [lab.add_pod(name, n, bridged=is_bridged) for n, name in enumerate(("web", "other"), 1)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(links.on_one_cpu())
        made = stack.enter_context(contextlib.closing(Site(lab, pods[0], pods[1], ways)))
        # Neighbours are resolved, and ports of a bridge are up.
        for pod in pods:
            with pod.listen(80):
                for version in (4, 6):
                    assert traffic.node_reaches(pod, version)
        with pods[0].listen(80):
            for version in (4, 6):
                to = (traffic.address(pods[0], version), 80)
                with pods[1].open_socket(traffic.family(version), socket.SOCK_STREAM) as sock:
                    sock.settimeout(traffic.LIMIT_SECONDS)
                    sock.connect(to)
        made.arrived()
        yield made


@contextlib.contextmanager
def _loopback_and_pair() -> Iterator[tuple[Way, ...]]:
    with links.pair() as (one, other), links.macvlans() as (upper, next_to):
        yield (
            Way("loopback", "lo", bytes(6)),
            Way("pair", one, links.mac_of(other)),
            Way("macvlan", upper, links.mac_of(next_to)),
        )


@contextlib.contextmanager
def _plain(lab: Lab, *, is_bridged: bool) -> Iterator[Site]:
    """Another pod, in off, forwards what it is sent."""
    with _loopback_and_pair() as ways, _site(lab, *ways, is_bridged=is_bridged) as made:
        _add_router_pod(made, is_bridged=is_bridged)
        yield made


def _add_router_pod(site: Site, *, is_bridged: bool) -> LabPod:
    router, mac = _add_router(site.lab, is_bridged=is_bridged)
    site.others.append(router)
    site.ways = (*site.ways, Way("router", router.interface, mac))
    return router


@contextlib.contextmanager
def _without_pods(lab: Lab) -> Iterator[Site]:
    """A second bridge has three ports: two pairs' ends, of which one leads to the node and one to
    the pods' bridge, and one more, so that it floods."""
    with (
        links.made("br-pg", "link add br-pg type bridge", "link set br-pg up"),
        links.pair() as (one, other),
        links.made("br-port", "link add br-port type veth peer name br-peer"),
        links.made("patch0", "link add patch0 type veth peer name patch1"),
    ):
        for port in (one, "br-port", "patch0"):
            links.ip(f"link set {port} master br-pg")
        for end in ("br-port", "br-peer", "patch0", "patch1"):
            links.ip(f"link set {end} up")
        ways = [Way("flood", "br-pg", links.mac_of(other))]
        with _site(lab, is_bridged=True) as made:
            links.ip(f"link set patch1 master {labs.BRIDGE}")
            for port in (one, "br-port", "patch0", "patch1"):
                links.wait_for_port(port)
            made.ways = (*ways, Way("patch", "br-pg", made.mac))
            yield made
            links.ip("link set patch1 nomaster")


@contextlib.contextmanager
def _flooding(lab: Lab) -> Iterator[Site]:
    """What a bridge sends to the first of its ports is a copy, without the socket."""
    with _site(lab, is_bridged=True) as made:
        traffic.forget_ports(labs.BRIDGE, (made.pod, made.neighbour))
        made.ways = (Way("bridge", labs.BRIDGE, made.mac),)
        yield made


@contextlib.contextmanager
def _flat(lab: Lab) -> Iterator[Site]:
    """The pods' gateway is a pod in off on their bridge; the node forwards nothing."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(_site(lab, is_bridged=True))
        router = _add_router_pod(made, is_bridged=True)
        for pod in (made.pod, made.neighbour):
            for version in (4, 6):
                via = traffic.address(router, version)
                links.ip_inside(pod, f"route replace default via {via}")
        for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            stack.enter_context(links.sysctl(f"net/{name}", "0"))
        yield made


def _add_router(lab: Lab, *, is_bridged: bool) -> tuple[LabPod, bytes]:
    """Another machine, or a pod that forwards; and its interface's address."""
    router = lab.add_pod("router", 9, bridged=is_bridged)
    links.let_forward(router)
    router.netns.run_inside(node.lift_limits)
    return router, mac_inside(router, "eth0")


def _forget_stamps(router: LabPod, interface: str) -> None:
    """As a wire does, which carries bytes only: the kernel copies a class id to tc_index."""
    for command in (
        f"qdisc add dev {interface} clsact",
        f"filter add dev {interface} ingress protocol all u32 match u32 0 0 flowid 1:0",
    ):
        enter = ["nsenter", f"--net={router.netns.path}", "tc"]
        subprocess.run([*enter, *command.split()], check=True)


@contextlib.contextmanager
def _uplink(lab: Lab) -> Iterator[Site]:
    """The default gateway sends packets for pods back."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(_site(lab, is_bridged=False))
        router, mac = _add_router(lab, is_bridged=False)
        _forget_stamps(router, "eth0")
        for name in ("all", router.interface):
            stack.enter_context(links.sysctl(f"net/ipv4/conf/{name}/send_redirects", "0"))
        for version in (4, 6):
            gateway = traffic.address(router, version)
            stack.enter_context(links.default_route(gateway, router.interface))
        made.ways = (Way("uplink", router.interface, mac),)
        yield made


@contextlib.contextmanager
def _tunnel_uplink(lab: Lab) -> Iterator[Site]:
    """The same, behind a tunnel of the node's (VXLAN); a second one is over IPv6."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(_site(lab, is_bridged=False))
        router, _ = _add_router(lab, is_bridged=False)
        _forget_stamps(router, "eth0")
        here = traffic.NODE[4]
        mac = tunnelled.MAC.hex(":")
        kind = f"type vxlan id {tunnelled.NETWORK} dstport {UNDERLAY_PORT}"
        inside = f"link add vx-pg {kind} local {router.ipv4} remote {here} dev eth0"
        device = f"dev {router.interface}"
        outside = f"link add vx-pg address {mac} {kind} local {here} remote {router.ipv4} {device}"
        second = f"link add vx6-pg address {mac} {kind} local {traffic.NODE[6]} {device}"
        links.ip_inside(router, inside, "link set vx-pg up")
        _forget_stamps(router, "vx-pg")
        stack.enter_context(links.made("vx-pg", outside, "link set vx-pg up"))
        stack.enter_context(links.made("vx6-pg", second, "link set vx6-pg up"))
        for name in ("all", "vx-pg"):
            stack.enter_context(links.sysctl(f"net/ipv4/conf/{name}/send_redirects", "0"))
        for version, (own, theirs) in _OVERLAY.items():
            bits, no_detection = _BITS[version], " nodad" if version == 6 else ""
            links.ip(f"address add {own}/{bits} dev vx-pg{no_detection}")
            links.ip_inside(
                router,
                f"address add {theirs}/{bits} dev vx-pg{no_detection}",
                f"route replace default via {own} dev vx-pg",
            )
            stack.enter_context(links.default_route(theirs, "vx-pg"))
        made.ways = (Way("uplink", "vx-pg", mac_inside(router, "vx-pg")),)
        yield made


@contextlib.contextmanager
def _tun_uplink(lab: Lab) -> Iterator[Site]:
    """The same, behind an interface without Ethernet headers, as WireGuard's."""
    with _site(lab, is_bridged=False) as made, links.tun() as (name, descriptor):
        os.set_blocking(descriptor, False)
        links.ip(f"route add 0.0.0.0/0 dev {name}", f"route add ::/0 dev {name}")
        own = {frames.address(text).packed for text in (*traffic.NODE.values(), *SERVICE.values())}
        own |= {one.packed for pod in (made.pod, made.neighbour) for one in pod.addresses}

        def turn() -> None:
            while True:
                try:
                    packet = os.read(descriptor, _TUN_BYTES)
                except BlockingIOError:
                    return
                if own & {packet[16:20], packet[24:40]}:
                    os.write(descriptor, packet)

        made.ways = (Way("uplink", name, b"", turn),)
        yield made


_WITHIN = ("loopback", "pair", "macvlan", "router")

ROUTED = Topology(
    "routed",
    "each pod has a route of its own, as with Calico",
    _WITHIN,
    functools.partial(_plain, is_bridged=False),
)
BRIDGED = Topology(
    "bridged",
    "pods are on a bridge of the node",
    _WITHIN,
    functools.partial(_plain, is_bridged=True),
)
WITHOUT_PODS = Topology(
    *("bridge-without-pods", "a second bridge, without pods, floods to a pair and to the pods'"),
    *(("flood", "patch"), _without_pods),
)
FLOODING = Topology(
    *("flooding", "the pods' bridge knows no addresses, and sends all pods a copy"),
    *(("bridge",), _flooding),
)
FLAT = Topology(
    *("flat", "a pod in off is the gateway of the pods, and the node forwards nothing"),
    *(("router",), _flat),
)
UPLINK = Topology(
    "uplink", "a router behind the uplink sends packets for pods back", ("uplink",), _uplink
)
TUNNEL_UPLINK = Topology(
    "tunnel-uplink", "the same, the uplink is a tunnel (VXLAN)", ("uplink",), _tunnel_uplink
)
TUN_UPLINK = Topology(
    *("tun-uplink", "the same, the uplink has no Ethernet headers"),
    *(("uplink",), _tun_uplink),
)
ALL = (ROUTED, BRIDGED, WITHOUT_PODS, FLAT, UPLINK, TUNNEL_UPLINK, TUN_UPLINK, FLOODING)
