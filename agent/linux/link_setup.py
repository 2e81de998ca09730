"""Interfaces, addresses, neighbours and routes of a network namespace, set up by route netlink.

netns: this process's namespace if None. Each function raises `NetlinkError` with the kernel's
error, or `OSError` and `NetnsGoneError` as `agent.linux.netlink`. The caller limits the time.
"""

import contextlib
import os

from agent.linux import netlink, route_messages
from agent.linux.route_messages import LOCAL, LinkState, Route
from bpf.abi import IPAddress
from bpf.netlink import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NetlinkError,
    RequestSocket,
)
from probes.netns import Netns

ADD = NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK
REPLACE = NLM_F_CREATE | NLM_F_REPLACE | NLM_F_ACK


async def add_pair(name: str, peer: str, netns: Netns) -> None:
    """A veth pair, whose end `peer` is in another namespace."""
    descriptor = os.open(netns.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        other = route_messages.link(name=peer) + route_messages.in_namespace(descriptor)
        body = route_messages.link(name=name) + route_messages.veth(other)
        await netlink.request(route_messages.NEWLINK, body, flags=ADD)
    finally:
        os.close(descriptor)


def add_pair_here(name: str, peer: str) -> None:
    """A veth pair with both ends in the calling thread's namespace. Blocks."""
    other = route_messages.link(name=peer)
    body = route_messages.link(name=name) + route_messages.veth(other)
    with contextlib.closing(RequestSocket()) as requests:
        requests.change(route_messages.NEWLINK, ADD, body)


async def link(name: str, netns: Netns | None = None) -> LinkState:
    """The interface with this name."""
    body = route_messages.link(name=name)
    (message,) = await netlink.request(route_messages.GETLINK, body, netns=netns)
    return route_messages.parsed_link(message)


async def set_up(
    ifindex: int, netns: Netns | None = None, *, address: bytes = b"", mtu: int = 0
) -> None:
    """address: its link address; by default both stay as they are."""
    body = route_messages.link(ifindex, address=address, mtu=mtu, is_up=True)
    await netlink.request(route_messages.NEWLINK, body, netns=netns, flags=NLM_F_ACK)


async def delete_link(*, ifindex: int = 0, name: str = "") -> None:
    body = route_messages.link(ifindex, name=name)
    await netlink.request(route_messages.DELLINK, body, flags=NLM_F_ACK)


async def set_address(ifindex: int, address: IPAddress, netns: Netns | None = None) -> None:
    """Add or replace an address, alone: no route to others of a prefix. It may not be local yet
    (`is_local`)."""
    body = route_messages.address(ifindex, address, has_route=False)
    await netlink.request(route_messages.NEWADDR, body, netns=netns, flags=REPLACE)


async def set_neighbour(
    ifindex: int, address: IPAddress, link_address: bytes, netns: Netns | None = None
) -> None:
    """Add or replace a permanent neighbour, which needs no resolution."""
    body = route_messages.neighbour(ifindex, address, link_address)
    await netlink.request(route_messages.NEWNEIGH, body, netns=netns, flags=REPLACE)


async def set_route(route: Route, netns: Netns | None = None, *, flags: int = REPLACE) -> None:
    """flags: `ADD` or `REPLACE`."""
    await netlink.request(route_messages.NEWROUTE, route.packed(), netns=netns, flags=flags)


async def delete_route(route: Route) -> None:
    await netlink.request(route_messages.DELROUTE, route.packed(), flags=NLM_F_ACK)


async def routes(family: int) -> list[Route]:
    """All routes of all tables of this namespace, also those to its own addresses."""
    messages = await netlink.dump(route_messages.GETROUTE, route_messages.all_routes(family))
    return [route_messages.parsed_route(message) for message in messages]


async def route_to(address: IPAddress, netns: Netns | None = None) -> Route:
    """The route that packets to this address take."""
    body = route_messages.route_to(address)
    (message,) = await netlink.request(route_messages.GETROUTE, body, netns=netns)
    return route_messages.parsed_route(message)


async def is_local(address: IPAddress, netns: Netns | None = None) -> bool:
    """Whether the route to it is one to the namespace itself; there may be none yet."""
    try:
        return (await route_to(address, netns)).type == LOCAL
    except NetlinkError:
        return False
