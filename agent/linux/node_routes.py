"""Where the node itself would send a packet: its routes, and below a bridge its neighbours.

These are the node's own facts. A pod cannot write them, but for its own entry in the tables of a
bridge that it is on.
"""

import dataclasses
import enum
import errno
import ipaddress
import socket
import struct

from agent.linux import netlink
from bpf.abi import IPAddress, IPNetwork
from bpf.netlink import HEADER_BYTES, NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, attribute, attributes

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

# include/uapi/linux/rtnetlink.h and neighbour.h
_RTM_GETROUTE, _RTM_NEWNEIGH, _RTM_GETNEIGH = 26, 28, 30
# family, lengths of destination and source, tos, table, protocol, scope, type, flags
_ROUTE = struct.Struct("=BBBBBBBBI")
_RTA_DST, _RTA_OIF = 1, 4
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # family, interface, state, flags, type
_NDA_DST, _NDA_LLADDR, _NDA_MASTER = 1, 2, 9
_NTF_USE = 0x01
_HAS_LLADDR = 0x02 | 0x04 | 0x08 | 0x10 | 0x80  # reachable, stale, delay, probe, permanent
_ROUTE_ATTRIBUTES = HEADER_BYTES + _ROUTE.size
_NEIGHBOUR_ATTRIBUTES = HEADER_BYTES + _NEIGHBOUR.size
_U32 = struct.Struct("=I")


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
    """Queries about the node's forwarding tables, on the event loop."""

    async def route_to(self, address: IPAddress) -> NodeRoute:
        """The main lookup of the FIB, as for a packet of a local process. Raises `OSError`."""
        return await netlink.within(lambda host: _route_in(host, address))

    async def uplinks(self) -> set[int]:
        """Interfaces of the default routes. Raises `OSError`."""
        return await netlink.within(_uplinks_in)

    async def routes_by(self, ifindex: int) -> list[DeviceRoute]:
        """Unicast routes by one interface. Raises `OSError`."""
        found: list[DeviceRoute] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _ROUTE.pack(family, *[0] * 8)
            body += attribute(_RTA_OIF, _U32.pack(ifindex))
            try:
                routes = await netlink.dump(_RTM_GETROUTE, body, is_filtered=True)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise OSError(error.errno, f"routes by interface {ifindex}") from error
            else:
                found += [route for message in routes if (route := _device_route(message))]
        return found

    async def bridge_port_of(self, address: IPAddress, bridge: int) -> int | None:
        """The port of a bridge behind which the node finds an address of its own link.

        By the node's neighbour entry and the bridge's forwarding entry for it (RTM_GETNEIGH for one
        entry: Linux 5.0). None where either is missing. Raises `OSError`.
        """
        neighbour = await _entry(
            _NEIGHBOUR.pack(_family(address), bridge, 0, 0, 0) + attribute(_NDA_DST, address.packed)
        )
        if neighbour is None or not neighbour.state & _HAS_LLADDR or not neighbour.lladdr:
            return None
        port = await _entry(
            _NEIGHBOUR.pack(socket.AF_BRIDGE, 0, 0, 0, 0)
            + attribute(_NDA_LLADDR, neighbour.lladdr)
            + attribute(_NDA_MASTER, _U32.pack(bridge))
        )
        return port.ifindex if port else None

    async def solicit(self, address: IPAddress, ifindex: int) -> None:
        """Make the kernel resolve a neighbour, as a packet for it would. Raises `OSError`."""
        body = _NEIGHBOUR.pack(_family(address), ifindex, 0, _NTF_USE, 0)
        body += attribute(_NDA_DST, address.packed)
        flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
        try:
            await netlink.request(_RTM_NEWNEIGH, body, flags=flags)
        except OSError as error:
            if error.errno not in _NO_ENTRY:
                raise OSError(error.errno, f"resolving {address}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """Of a table of neighbours, or of a bridge's forwarding table."""

    ifindex: int
    state: int
    lladdr: bytes


async def _entry(key: bytes) -> _Entry | None:
    try:
        (answer,) = await netlink.request(_RTM_GETNEIGH, key)
    except OSError as error:
        if error.errno in _NO_ENTRY:
            return None
        raise OSError(error.errno, "neighbour of a bridge") from error
    _, ifindex, state, _, _ = _NEIGHBOUR.unpack_from(answer, HEADER_BYTES)
    lladdr = attributes(answer, _NEIGHBOUR_ATTRIBUTES).get(_NDA_LLADDR, b"")
    return _Entry(ifindex, state, lladdr)


def _route_in(host: netlink.Exchange, address: IPAddress) -> NodeRoute:
    body = _ROUTE.pack(_family(address), address.max_prefixlen, *[0] * 7)
    body += attribute(_RTA_DST, address.packed)
    try:
        (answer,) = host.request(_RTM_GETROUTE, body)
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return NodeRoute(RouteKind.NONE)
        raise OSError(error.errno, f"route to {address}") from error
    kind = _ROUTE.unpack_from(answer, HEADER_BYTES)[7]
    if kind in _OWN_TYPES:
        return NodeRoute(RouteKind.OWN)
    interface = attributes(answer, _ROUTE_ATTRIBUTES).get(_RTA_OIF)
    if kind != _RTN_UNICAST or not interface:
        return NodeRoute(RouteKind.NONE)
    return NodeRoute(RouteKind.SENT, *_U32.unpack(interface))


def _uplinks_in(host: netlink.Exchange) -> set[int]:
    found = set()
    for address in _ELSEWHERE:
        try:
            found.add(_route_in(host, address).ifindex)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
    return found - {0}


def _family(address: IPAddress) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _device_route(message: bytes) -> DeviceRoute | None:
    """None unless it is a unicast route."""
    family, length, _, _, _, origin, _, kind, _ = _ROUTE.unpack_from(message, HEADER_BYTES)
    if kind != _RTN_UNICAST:
        return None
    default = bytes(4 if family == socket.AF_INET else 16)
    destination = attributes(message, _ROUTE_ATTRIBUTES).get(_RTA_DST, default)
    network = ipaddress.ip_network((destination, length))
    return DeviceRoute(network, is_on_link=origin == _RTPROT_KERNEL)
