"""Interfaces, addresses and routes of one network namespace, set up by route netlink, blocking."""

import errno
import ipaddress
import os
import socket
import time

from agent.linux import network_setup, route_messages
from agent.linux.route_messages import Route
from bpf.abi import IPAddress
from bpf.netlink import NLM_F_CREATE, NLM_F_EXCL, NetlinkError, RequestSocket
from probes.netns import Netns

_NEW = NLM_F_CREATE | NLM_F_EXCL
_MAX_POLLS = 5000
_ANYWHERE = {4: ipaddress.ip_network("0.0.0.0/0"), 6: ipaddress.ip_network("::/0")}


class Links:
    """Requests to a namespace. Each raises `NetlinkError`."""

    def __init__(self, netns: Netns | None = None) -> None:
        """netns: this process's if None."""
        self._netlink = netns.run_inside(RequestSocket) if netns else RequestSocket()

    def close(self) -> None:
        self._netlink.close()

    def add_pair(self, name: str, group: int, peer: str, netns: Netns) -> int:
        """A veth pair whose other end, `peer`, is in another namespace; its index here."""
        descriptor = os.open(netns.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            other = route_messages.link(name=peer) + route_messages.in_namespace(descriptor)
            return self._add(name, group, route_messages.veth(other))
        finally:
            os.close(descriptor)

    def add_bridge(self, name: str, group: int) -> int:
        """Its index."""
        return self._add(name, group, route_messages.of_kind("bridge"))

    def _add(self, name: str, group: int, kind: bytes) -> int:
        body = route_messages.link(name=name, group=group) + kind
        self._netlink.change(route_messages.NEWLINK, _NEW, body)
        return socket.if_nametoindex(name)

    def set_up(self, ifindex: int, *, bridge: int | None = None) -> None:
        """bridge: the interface becomes a port of it."""
        body = route_messages.link(ifindex, bridge=bridge, is_up=True)
        self._netlink.change(route_messages.NEWLINK, 0, body)

    def wait_until_active(self, ifindex: int) -> None:
        """Returns when the kernel has noticed its carrier: before that it drops what it is to send,
        and a bridge what is for this port."""
        for _ in range(_MAX_POLLS):
            # A request makes it notice (Linux 6.8, facd15dfd691); earlier ones do within a second.
            body = route_messages.link(ifindex)
            (message,) = self._netlink.change(route_messages.GETLINK, 0, body)
            if route_messages.parsed_link(message).is_active:
                return
            time.sleep(network_setup.LOCAL_POLL_SECONDS)
        raise TimeoutError("an interface is up, but has no carrier yet")

    def delete(self, *, name: str = "", group: int | None = None) -> None:
        """The interface with this name, or those of the group: none is no error."""
        body = route_messages.link(name=name, group=group)
        try:
            self._netlink.change(route_messages.DELLINK, 0, body)
        except NetlinkError as error:
            if error.errno != errno.ENODEV:
                raise

    def add_address(
        self, ifindex: int, address: IPAddress, prefix_length: int | None = None
    ) -> None:
        """Returns when the namespace accepts packets to it."""
        body = route_messages.address(ifindex, address, prefix_length)
        self._netlink.change(route_messages.NEWADDR, _NEW, body)
        if address.version == 4:
            return
        for _ in range(_MAX_POLLS):
            if self._is_local(address):
                return
            time.sleep(network_setup.LOCAL_POLL_SECONDS)
        raise TimeoutError(f"{address} was added, but is not a local address yet")

    def delete_address(self, ifindex: int, address: IPAddress) -> None:
        body = route_messages.address(ifindex, address)
        self._netlink.change(route_messages.DELADDR, 0, body)

    def add_host_route(self, address: IPAddress, ifindex: int) -> None:
        """To an address on the link."""
        host = ipaddress.ip_network(address)
        self._add_route(Route(host, ifindex=ifindex, scope=route_messages.LINK))

    def add_default_route(self, gateway: IPAddress, ifindex: int) -> None:
        self._add_route(Route(_ANYWHERE[gateway.version], ifindex=ifindex, gateway=gateway))

    def _add_route(self, route: Route) -> None:
        self._netlink.change(route_messages.NEWROUTE, _NEW, route.packed())

    def _is_local(self, address: IPAddress) -> bool:
        """Whether the route to it is one to the namespace itself; there may be none yet."""
        body = route_messages.route_to(address)
        try:
            found = self._netlink.change(route_messages.GETROUTE, 0, body)
        except NetlinkError:
            return False
        return any(route_messages.parsed_route(one).type == route_messages.LOCAL for one in found)
