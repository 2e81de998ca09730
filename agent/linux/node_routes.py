"""Where the node itself would send a packet: its routes, and below a bridge its neighbours.

These are the node's own facts. A pod cannot write them, but for its own entry in the tables of a
bridge that it is on.
"""

import dataclasses
import enum
import errno
import ipaddress
import socket

import pyroute2
from pyroute2.netlink.rtnl import ndmsg, rtmsg

from agent.linux.rtnetlink import SharedIPRoute
from bpf.abi import IPAddress, IPNetwork

# include/uapi/linux/rtnetlink.h: types under which the node keeps a packet for itself.
_RTN_UNICAST, _OWN_TYPES = 1, frozenset({2, 3, 4, 5})  # local, broadcast, anycast, multicast
_RTPROT_KERNEL = 2
# Of no host: where a packet to elsewhere goes (RFC 5737, RFC 3849).
_ELSEWHERE = (ipaddress.ip_address("192.0.2.1"), ipaddress.ip_address("2001:db8::1"))
# Errors of a lookup without a result: no route, or one that forbids.
_NO_ROUTE = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL})
# Of a dump: the interface was just deleted, or the node has no IPv6 (ipv6.disable=1).
_NOT_THERE = frozenset({errno.ENODEV, errno.EOPNOTSUPP, errno.EAFNOSUPPORT})
_NO_ENTRY = frozenset({errno.ENOENT, errno.ENODEV, errno.EINVAL})
_HAS_LLADDR = sum(ndmsg.states[n] for n in ("reachable", "stale", "delay", "probe", "permanent"))


class RouteKind(enum.Enum):
    """What the node does with a packet for an address."""

    NONE = enum.auto()
    OWN = enum.auto()
    """The address is the node's own."""
    SENT = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRoute:
    """ifindex: of the interface by which the packet leaves; 0 unless it is sent."""

    kind: RouteKind
    ifindex: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRoute:
    """A route by a certain interface, of any table. is_on_link: the kernel made it for an address
    of the interface."""

    network: IPNetwork
    is_on_link: bool


class NodeRoutes:
    """Queries about the node's forwarding tables, on the event loop; `close` it at the end."""

    def __init__(self, netlink: pyroute2.AsyncIPRoute | None = None) -> None:
        # Strict: the kernel filters what it dumps (Linux 4.20); else pyroute2 does.
        self._netlink = netlink or SharedIPRoute(strict_check=True)

    def close(self) -> None:
        self._netlink.close()

    async def route_to(self, address: IPAddress) -> NodeRoute:
        """The main lookup of the FIB, as for a packet of a local process. Raises `OSError`."""
        try:
            answer = await self._netlink.route("get", dst=str(address), family=_family(address))
        except pyroute2.NetlinkError as error:
            if error.code in _NO_ROUTE:
                return NodeRoute(RouteKind.NONE)
            raise OSError(error.code, f"route to {address}") from error
        (route, *_) = answer
        if route["type"] in _OWN_TYPES:
            return NodeRoute(RouteKind.OWN)
        ifindex = route.get_attr("RTA_OIF")
        if route["type"] != _RTN_UNICAST or not ifindex:
            return NodeRoute(RouteKind.NONE)
        return NodeRoute(RouteKind.SENT, int(ifindex))

    async def uplinks(self) -> set[int]:
        """Interfaces of the default routes. Raises `OSError`."""
        found = set()
        for address in _ELSEWHERE:
            try:
                found.add((await self.route_to(address)).ifindex)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise
        return found - {0}

    async def routes_by(self, ifindex: int) -> list[DeviceRoute]:
        """Unicast routes by one interface. Raises `OSError`."""
        found: list[DeviceRoute] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                dump = await self._netlink.route("dump", family=family, oif=ifindex)
                found += [_device_route(r) async for r in dump if r["type"] == _RTN_UNICAST]
            except pyroute2.NetlinkError as error:
                if error.code not in _NOT_THERE:
                    raise OSError(error.code, f"routes by interface {ifindex}") from error
        return found

    async def bridge_port_of(self, address: IPAddress, bridge: int) -> int | None:
        """The port of a bridge behind which the node finds an address of its own link.

        By the node's neighbour entry and the bridge's forwarding entry for it (RTM_GETNEIGH for one
        entry: Linux 5.0). None where either is missing. Raises `OSError`.
        """
        neighbour = await self._entry(dst=str(address), ifindex=bridge, family=_family(address))
        if neighbour is None or not neighbour["state"] & _HAS_LLADDR:
            return None
        lladdr = neighbour.get_attr("NDA_LLADDR")
        if lladdr is None:
            return None
        port = await self._entry(lladdr=lladdr, master=bridge, family=socket.AF_BRIDGE)
        return int(port["ifindex"]) if port is not None else None

    async def solicit(self, address: IPAddress, ifindex: int) -> None:
        """Make the kernel resolve a neighbour, as a packet for it would. Raises `OSError`."""
        try:
            await self._netlink.neigh(
                "replace",
                dst=str(address),
                ifindex=ifindex,
                family=_family(address),
                flags=ndmsg.flags["use"],
                state=0,
            )
        except pyroute2.NetlinkError as error:
            if error.code not in _NO_ENTRY:
                raise OSError(error.code, f"resolving {address}") from error

    async def _entry(self, **key: object) -> ndmsg.ndmsg | None:
        try:
            return (await self._netlink.neigh("get", **key))[0]
        except pyroute2.NetlinkError as error:
            if error.code in _NO_ENTRY:
                return None
            raise OSError(error.code, f"neighbour {key}") from error


def _family(address: IPAddress) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _device_route(route: rtmsg.rtmsg) -> DeviceRoute:
    default = "0.0.0.0" if route["family"] == socket.AF_INET else "::"
    destination = route.get_attr("RTA_DST") or default
    return DeviceRoute(
        ipaddress.ip_network(f"{destination}/{route['dst_len']}"),
        route["proto"] == _RTPROT_KERNEL,
    )
