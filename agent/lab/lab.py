"""A node and its pods as network namespaces, with real interfaces and no uplink.

`isolate` moves the calling process to new namespaces: a network namespace that becomes the "node",
and a mount namespace for the names of the pods' namespaces and a BPF file system. They have no name
outside, so the kernel removes them with their last process, however that ends.

Addresses are of 198.18.0.0/15 (RFC 2544) and fd00:18::/32 only; the node has no uplink.
"""

import contextlib
import dataclasses
import ipaddress
import os
import pathlib
import shutil
import socket
import subprocess
import time

from agent.lab.links import Links
from agent.linux import namespaces, network_setup
from bpf.abi import IPAddress
from probes.netns import Netns

_MAX_POLLS = 5000

NODE_IPV4 = ipaddress.IPv4Address("198.18.0.1")
NODE_IPV6 = ipaddress.IPv6Address("fd00:18::1")
_BRIDGE_IPV4 = ipaddress.IPv4Interface("198.18.2.1/24")
_BRIDGE_IPV6 = ipaddress.IPv6Interface("fd00:18:0:2::1/64")
BRIDGE = "pgbr0"
# LOOPBACK_IFINDEX of net/flow.h: the first device of each namespace.
_LOOPBACK = 1
_LINK_SCOPE, _TENTATIVE = "20", 0x40  # include/net/ipv6.h, linux/if_addr.h
# Of the lab's links, which are deleted by one request: for each the kernel waits for RCU.
_LINK_GROUP = 198

# Mount points of pods' namespaces and the BPF file system, visible inside only.
LAB_DIRECTORY = pathlib.Path("/run/podgate-lab")
BPFFS = LAB_DIRECTORY / "bpf"


@dataclasses.dataclass(frozen=True, slots=True)
class LabPod:
    """One pod: its namespace, the host's end of its veth pair and its addresses."""

    name: str
    netns: Netns
    interface: str
    ifindex: int
    addresses: tuple[IPAddress, ...]
    is_bridged: bool

    @property
    def ipv4(self) -> str:
        return str(next(address for address in self.addresses if address.version == 4))

    @property
    def ipv6(self) -> str:
        return str(next(address for address in self.addresses if address.version == 6))

    def open_socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """A blocking socket inside the pod, with a time limit of one second."""
        sock = self.netns.socket(family, kind, protocol)
        sock.settimeout(1)
        return sock

    def listen(self, port: int, family: int = socket.AF_INET6) -> socket.socket:
        """A TCP server's socket on all addresses of the pod (both families, for IPv6)."""
        sock = self.open_socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
        sock.listen()
        return sock


def isolate(*, has_own_mounts: bool = False) -> None:
    """Move the calling process to new network and mount namespaces.

    has_own_mounts: it is in a private mount namespace already. To be called before the process has
    other threads. Raises `OSError` (EPERM: not root).
    """
    if has_own_mounts:
        namespaces.unshare_network()
    else:
        namespaces.unshare_network_and_mounts()
    # Over all of /run, so that not even an empty directory is left outside.
    namespaces.mount("tmpfs", pathlib.Path("/run"))
    LAB_DIRECTORY.mkdir(mode=0o700)
    for name in ("netns", "bpf"):
        (LAB_DIRECTORY / name).mkdir()
    namespaces.mount("bpf", BPFFS)


class Lab:
    """Creates pods for the process's own namespace as the node, and removes them at its exit."""

    def __init__(self) -> None:
        self.pods: dict[str, LabPod] = {}
        self._links = Links()
        self._bridge_ifindex: int | None = None
        _enable_forwarding()
        self._links.set_up(_LOOPBACK)
        for address in (NODE_IPV4, NODE_IPV6):
            self._links.add_address(_LOOPBACK, address)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: object) -> None:
        self._links.delete(group=_LINK_GROUP)
        for pod in self.pods.values():
            _remove_netns(pod.netns)
        self.pods.clear()
        for address in (NODE_IPV4, NODE_IPV6):
            self._links.delete_address(_LOOPBACK, address)
        self._links.close()

    def add_pod(self, name: str, number: int, *, bridged: bool = False) -> LabPod:
        """A pod with one IPv4 and one IPv6 address. `number` (1 to 250) makes them unique.

        Routed pods have a host route on the node, as with Calico; bridged ones share a bridge and
        a subnet, as with the CNI's bridge plugin.
        """
        netns = _make_netns(name)
        interface = f"pg{name}"[:15]
        ifindex = self._links.add_pair(interface, _LINK_GROUP, "eth0", netns)
        if bridged:
            addresses = self._join_bridge(netns, ifindex, number)
        else:
            addresses = self._route(netns, ifindex, number)
        pod = LabPod(name, netns, interface, ifindex, addresses, bridged)
        self.pods[name] = pod
        return pod

    def remove_pod(self, name: str) -> None:
        """Delete the pod's namespace and its interface, at once."""
        pod = self.pods.pop(name)
        self._links.delete(name=pod.interface)
        _remove_netns(pod.netns)

    def _route(self, netns: Netns, ifindex: int, number: int) -> tuple[IPAddress, ...]:
        ipv4 = ipaddress.IPv4Address(f"198.18.1.{number}")
        ipv6 = ipaddress.IPv6Address(f"fd00:18:0:1::{number:x}")
        self._links.set_up(ifindex)
        self._links.add_address(ifindex, NODE_IPV4)
        self._links.add_address(ifindex, NODE_IPV6)
        with contextlib.closing(Links(netns)) as inside:
            eth0 = _bring_up(inside, netns)
            for own, node in ((ipv4, NODE_IPV4), (ipv6, NODE_IPV6)):
                inside.add_address(eth0, own)
                inside.add_host_route(node, eth0)
                inside.add_default_route(node, eth0)
                self._links.add_host_route(own, ifindex)
        self._links.wait_until_active(ifindex)
        return ipv4, ipv6

    def _join_bridge(self, netns: Netns, ifindex: int, number: int) -> tuple[IPAddress, ...]:
        if self._bridge_ifindex is None:
            self._bridge_ifindex = self._make_bridge()
        ipv4 = _BRIDGE_IPV4.network[number + 1]
        ipv6 = _BRIDGE_IPV6.network[number + 1]
        self._links.set_up(ifindex, bridge=self._bridge_ifindex)
        with contextlib.closing(Links(netns)) as inside:
            eth0 = _bring_up(inside, netns)
            for own, node in ((ipv4, _BRIDGE_IPV4), (ipv6, _BRIDGE_IPV6)):
                inside.add_address(eth0, own, node.network.prefixlen)
                inside.add_default_route(node.ip, eth0)
        self._links.wait_until_active(ifindex)
        # It has a carrier once a port has one.
        self._links.wait_until_active(self._bridge_ifindex)
        return ipv4, ipv6

    def _make_bridge(self) -> int:
        ifindex = self._links.add_bridge(BRIDGE, _LINK_GROUP)
        self._links.set_up(ifindex)
        for interface in (_BRIDGE_IPV4, _BRIDGE_IPV6):
            self._links.add_address(ifindex, interface.ip, interface.network.prefixlen)
        return ifindex


def popen_in(netns: Netns, arguments: list[str]) -> "subprocess.Popen[bytes]":
    """Start a process inside a pod; its output is discarded."""
    nsenter = shutil.which("nsenter") or "nsenter"
    return subprocess.Popen(
        [nsenter, f"--net={netns.path}", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _make_netns(name: str) -> Netns:
    """A new network namespace, named by a bind mount."""
    path = LAB_DIRECTORY / "netns" / name
    path.touch(exist_ok=False)

    def set_up() -> None:
        namespaces.mount_own_netns(path)
        for interface in ("all", "default"):
            network_setup.write_sysctl(f"ipv6/conf/{interface}/accept_dad", "0")

    namespaces.in_new_network(set_up)
    return Netns.open(str(path))


def _remove_netns(netns: Netns) -> None:
    namespaces.unmount(netns.path)
    os.unlink(netns.path)


def _bring_up(inside: Links, netns: Netns) -> int:
    """Returns when the pod sends: before it has a link-local address, it finds no neighbours for
    what it forwards."""
    eth0: int = netns.run_inside(lambda: socket.if_nametoindex("eth0"))
    for ifindex in (_LOOPBACK, eth0):
        inside.set_up(ifindex)
    inside.wait_until_active(eth0)
    if not network_setup.has_ip_version(6):
        return eth0
    for _ in range(_MAX_POLLS):
        if _has_link_local_address(netns):
            return eth0
        time.sleep(network_setup.LOCAL_POLL_SECONDS)
    raise TimeoutError("an interface is up, but has no link-local address yet")


def _has_link_local_address(netns: Netns) -> bool:
    # Address, index, prefix length, scope, flags, name (net/ipv6/addrconf.c: if6_seq_show).
    lines = [line.split() for line in netns.read_proc_net("if_inet6").splitlines()]
    return any(
        scope == _LINK_SCOPE and name == "eth0" and not int(flags, 16) & _TENTATIVE
        for _, _, _, scope, flags, name in lines
    )


def _enable_forwarding() -> None:
    for family in ("all", "default"):
        network_setup.write_sysctl(f"ipv6/conf/{family}/accept_dad", "0")
        network_setup.write_sysctl(f"ipv6/conf/{family}/forwarding", "1")
    network_setup.write_sysctl("ipv4/ip_forward", "1")
