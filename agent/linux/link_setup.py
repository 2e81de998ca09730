"""Interfaces, addresses, neighbours and routes of a network namespace, set up by route netlink.

netns: this process's namespace if None. Each function raises `NetlinkError` with the kernel's
error, or `OSError` and `NetnsGoneError` as `agent.linux.netlink`. The caller limits the time.
pyroute2 would take 9 MB of an agent's memory for it.
"""

import contextlib
import dataclasses
import ipaddress
import os
import struct

from agent.linux import netlink
from agent.linux.network_setup import family_of
from bpf.abi import IPAddress, IPNetwork
from bpf.netlink import (
    HEADER_BYTES,
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NetlinkError,
    RequestSocket,
    attribute,
    attributes,
)
from probes.netns import Netns

# include/uapi/linux/rtnetlink.h, if_link.h, if_addr.h, neighbour.h, veth.h
_RTM_NEWLINK, _RTM_DELLINK, _RTM_GETLINK, _RTM_NEWADDR = 16, 17, 18, 20
_RTM_NEWROUTE, _RTM_DELROUTE, _RTM_GETROUTE, _RTM_NEWNEIGH = 24, 25, 26, 28
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, which flags change
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_OPERSTATE = 1, 3, 4, 16
_IFLA_LINKINFO, _IFLA_NET_NS_FD, _IFLA_INFO_KIND, _IFLA_INFO_DATA = 18, 28, 1, 2
_VETH_INFO_PEER = 1
_IFF_UP, _IF_OPER_UP = 1, 6
_ADDRESS = struct.Struct("=BBBBi")  # family, prefix length, flags, scope, index
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFA_F_NODAD, _IFA_F_NOPREFIXROUTE = 0x02, 0x200
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # family, index, state, flags, type
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80
# family, lengths of destination and source, tos, table, protocol, scope, type, flags
_ROUTE = struct.Struct("=BBBBBBBBI")
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC, _RTA_TABLE = 1, 4, 5, 6, 7, 15
_RTNH_F_ONLINK = 4
_U32 = struct.Struct("=I")

ADD = NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK
REPLACE = NLM_F_CREATE | NLM_F_REPLACE | NLM_F_ACK

UNICAST, LOCAL, UNREACHABLE = 1, 2, 7
"""Types of routes."""
UNIVERSE, LINK, HOST = 0, 253, 254
"""Scopes of routes."""
MAIN_TABLE, LOCAL_TABLE = 254, 255
STATIC = 4
"""The usual origin of routes (RTPROT_STATIC)."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinkState:
    """An interface. address: its link address, 6 bytes; is_active: whether it sends packets."""

    index: int
    address: bytes
    mtu: int
    is_active: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """A route as it is to be, or as the kernel has it. protocol: its origin; metric: 0 for none;
    is_on_link: whether the gateway is on the link though no route shows that."""

    destination: IPNetwork
    type: int = UNICAST
    ifindex: int = 0
    gateway: IPAddress | None = None
    scope: int = UNIVERSE
    table: int = MAIN_TABLE
    protocol: int = STATIC
    metric: int = 0
    source: IPAddress | None = None
    is_on_link: bool = False

    def packed(self) -> bytes:
        """A struct rtmsg and its attributes."""
        network = self.destination
        body = _ROUTE.pack(
            *(family_of(network.version), network.prefixlen, 0, 0),
            *(self.table, self.protocol, self.scope, self.type),
            _RTNH_F_ONLINK if self.is_on_link else 0,
        )
        if network.prefixlen:
            body += attribute(_RTA_DST, network.network_address.packed)
        if self.ifindex:
            body += attribute(_RTA_OIF, _U32.pack(self.ifindex))
        if self.gateway:
            body += attribute(_RTA_GATEWAY, self.gateway.packed)
        if self.metric:
            body += attribute(_RTA_PRIORITY, _U32.pack(self.metric))
        if self.source:
            body += attribute(_RTA_PREFSRC, self.source.packed)
        return body


async def add_pair(name: str, peer: str, netns: Netns) -> None:
    """A veth pair, whose end `peer` is in another namespace."""
    descriptor = os.open(netns.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        other = _LINK.pack(0, 0, 0, 0, 0) + _name(peer)
        other += attribute(_IFLA_NET_NS_FD, _U32.pack(descriptor))
        await netlink.request(_RTM_NEWLINK, _veth(name, other), flags=ADD)
    finally:
        os.close(descriptor)


def add_pair_here(name: str, peer: str) -> None:
    """A veth pair with both ends in the calling thread's namespace. Blocks."""
    body = _veth(name, _LINK.pack(0, 0, 0, 0, 0) + _name(peer))
    with contextlib.closing(RequestSocket()) as requests:
        requests.change(_RTM_NEWLINK, ADD, body)


def _veth(name: str, peer: bytes) -> bytes:
    info = attribute(_IFLA_INFO_KIND, b"veth")
    info += attribute(_IFLA_INFO_DATA, attribute(_VETH_INFO_PEER, peer))
    return _LINK.pack(0, 0, 0, 0, 0) + _name(name) + attribute(_IFLA_LINKINFO, info)


async def link(name: str, netns: Netns | None = None) -> LinkState:
    """The interface with this name."""
    body = _LINK.pack(0, 0, 0, 0, 0) + _name(name)
    (message,) = await netlink.request(_RTM_GETLINK, body, netns=netns)
    _, _, index, _, _ = _LINK.unpack_from(message, HEADER_BYTES)
    values = attributes(message, HEADER_BYTES + _LINK.size)
    (mtu,) = _U32.unpack_from(values[_IFLA_MTU])
    return LinkState(
        index,
        values.get(_IFLA_ADDRESS, b""),
        mtu,
        is_active=values.get(_IFLA_OPERSTATE, b"\0")[0] == _IF_OPER_UP,
    )


async def set_up(
    ifindex: int, netns: Netns | None = None, *, address: bytes = b"", mtu: int = 0
) -> None:
    """address: its link address; by default both stay as they are."""
    body = _LINK.pack(0, 0, ifindex, _IFF_UP, _IFF_UP)
    if address:
        body += attribute(_IFLA_ADDRESS, address)
    if mtu:
        body += attribute(_IFLA_MTU, _U32.pack(mtu))
    await netlink.request(_RTM_NEWLINK, body, netns=netns, flags=NLM_F_ACK)


async def delete_link(*, ifindex: int = 0, name: str = "") -> None:
    body = _LINK.pack(0, 0, ifindex, 0, 0) + (_name(name) if name else b"")
    await netlink.request(_RTM_DELLINK, body, flags=NLM_F_ACK)


async def set_address(ifindex: int, address: IPAddress, netns: Netns | None = None) -> None:
    """Add or replace an address, alone: no route to others of a prefix. It may not be local yet
    (`is_local`)."""
    # Duplicate address detection makes an address unusable for its first second.
    flags = _IFA_F_NOPREFIXROUTE | (_IFA_F_NODAD if address.version == 6 else 0)
    body = _ADDRESS.pack(family_of(address.version), address.max_prefixlen, 0, 0, ifindex)
    body += attribute(_IFA_ADDRESS, address.packed) + attribute(_IFA_FLAGS, _U32.pack(flags))
    if address.version == 4:
        body += attribute(_IFA_LOCAL, address.packed)
    await netlink.request(_RTM_NEWADDR, body, netns=netns, flags=REPLACE)


async def set_neighbour(
    ifindex: int, address: IPAddress, link_address: bytes, netns: Netns | None = None
) -> None:
    """Add or replace a permanent neighbour, which needs no resolution."""
    body = _NEIGHBOUR.pack(family_of(address.version), ifindex, _NUD_PERMANENT, 0, 0)
    body += attribute(_NDA_DST, address.packed) + attribute(_NDA_LLADDR, link_address)
    await netlink.request(_RTM_NEWNEIGH, body, netns=netns, flags=REPLACE)


async def set_route(route: Route, netns: Netns | None = None, *, flags: int = REPLACE) -> None:
    """flags: `ADD` or `REPLACE`."""
    await netlink.request(_RTM_NEWROUTE, route.packed(), netns=netns, flags=flags)


async def delete_route(route: Route) -> None:
    await netlink.request(_RTM_DELROUTE, route.packed(), flags=NLM_F_ACK)


async def routes(family: int) -> list[Route]:
    """All routes of all tables of this namespace, also those to its own addresses."""
    messages = await netlink.dump(_RTM_GETROUTE, _ROUTE.pack(family, *[0] * 8))
    return [_parsed(message) for message in messages]


async def route_to(address: IPAddress, netns: Netns | None = None) -> Route:
    """The route that packets to this address take."""
    family = family_of(address.version)
    body = _ROUTE.pack(family, address.max_prefixlen, *[0] * 7)
    body += attribute(_RTA_DST, address.packed)
    (message,) = await netlink.request(_RTM_GETROUTE, body, netns=netns)
    return _parsed(message)


async def is_local(address: IPAddress, netns: Netns | None = None) -> bool:
    """Whether the route to it is one to the namespace itself; there may be none yet."""
    try:
        return (await route_to(address, netns)).type == LOCAL
    except NetlinkError:
        return False


def _parsed(message: bytes) -> Route:
    family, length, _, _, table, protocol, scope, type_, _ = _ROUTE.unpack_from(
        message, HEADER_BYTES
    )
    values = attributes(message, HEADER_BYTES + _ROUTE.size)
    size = 4 if family == family_of(4) else 16
    address = ipaddress.ip_address(values.get(_RTA_DST, bytes(size)))
    return Route(
        ipaddress.ip_network(f"{address}/{length}"),
        type=type_,
        ifindex=_number(values.get(_RTA_OIF)),
        scope=scope,
        table=_number(values.get(_RTA_TABLE)) or table,
        protocol=protocol,
        metric=_number(values.get(_RTA_PRIORITY)),
    )


def _number(value: bytes | None) -> int:
    return int(_U32.unpack_from(value)[0]) if value and len(value) >= _U32.size else 0


def _name(name: str) -> bytes:
    return attribute(_IFLA_IFNAME, name.encode() + b"\0")
