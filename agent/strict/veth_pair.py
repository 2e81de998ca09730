"""The veth pair that connects a relay's network namespace with the host.

The host's end is gated before it is up. Addresses of the relay's range that no relay uses are
unreachable: a connect to them must fail here, and not leave by the default route. Neighbours are
permanent, so the pair needs neither ARP nor neighbour discovery, and accepts nothing from outside.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pyroute2

from agent.errors import PodgateError
from agent.linux import network_setup
from agent.linux.network_setup import family_of
from agent.relay import interfaces as relay_interfaces
from agent.settings import RelayRanges
from agent.strict import ranges as strict_ranges
from agent.strict.ranges import RangeShare, Route
from bpf.abi import IPAddress
from probes.netns import Netns, NetnsError

INSIDE = "node0"
"""Name of the pair's end in the relay's namespace."""

_TIMEOUT_SECONDS = 10

# Origin of podgate's routes, as `ip route` shows it; a number that rtnetlink.h does not assign.
_PROTOCOL = 112
# Lower priority than any route of the node's owner.
_LAST_METRIC = 4_000_000_000
_ONLINK = 4  # RTNH_F_ONLINK
_LOCAL_TABLE = 255

# Of the host's end. Packets from the relay are not forwarded, router advertisements not accepted.
_HOST_SETTINGS = {
    "ipv4": {"forwarding": "0", "accept_local": "0"},
    "ipv6": {"disable_ipv6": "0", "accept_ra": "0", "addr_gen_mode": "1", "forwarding": "0"},
}
# Of the relay's end. Packets are for any address of the range, from an address of the host.
_INSIDE_SETTINGS = {
    "ipv4": {"rp_filter": "0"},
    "ipv6": {"disable_ipv6": "0", "accept_ra": "0", "addr_gen_mode": "1", "accept_dad": "0"},
}


class PairError(PodgateError):
    """The host cannot be connected with a relay."""


@dataclasses.dataclass(frozen=True, slots=True)
class VethPair:
    """A pair that is set up. ifindex, name: of the host's end."""

    slot: int
    ifindex: int
    name: str
    shares: tuple[RangeShare, ...]
    """Of the families that the kernel has."""
    inside_address: str
    """The link address of the relay's end."""
    address: str
    """The link address of the host's end, which the relay's end knows as its neighbour's."""
    mtu: int
    """Of both ends, bytes."""


def reserve_slot() -> int:
    """The slot of the next relay. Raises `PairError`."""
    slots = map(relay_interfaces.slot_of, relay_interfaces.present().values())
    slot = strict_ranges.free_slot([slot for slot in slots if slot is not None])
    if slot is None:
        raise PairError(
            f"{strict_ranges.SLOTS} relays still proxy open connections; retry in a minute."
        )
    return slot


async def overlap(ranges: RelayRanges) -> str | None:
    """One sentence if the node already uses these ranges. Raises `PairError`."""
    async with _pair_errors("cannot read the node's routes"), pyroute2.AsyncIPRoute() as netlink:
        routes = [route async for route in _foreign_routes(netlink)]
    return strict_ranges.find_overlap(ranges, routes)


async def add_range_routes(ranges: RelayRanges) -> None:
    """Reserve the ranges for relays: unreachable except through their pairs. The routes stay when
    the relays exit.

    Raises `PairError`, also if the node already uses a range.
    """
    if problem := await overlap(ranges):
        raise PairError(problem)
    await ensure_range_routes(ranges)
    async with (
        _pair_errors("cannot remove a previous relay range"),
        pyroute2.AsyncIPRoute() as netlink,
    ):
        await _remove_ranges(netlink, {str(network) for network in ranges.networks})


async def ensure_range_routes(ranges: RelayRanges) -> None:
    """Restore routes that another program removed, without reading all routes of the node.

    Raises `PairError`.
    """
    async with _pair_errors("cannot reserve the relay's range"), pyroute2.AsyncIPRoute() as netlink:
        for network in ranges.networks:
            if network_setup.has_ip_version(network.version):
                await netlink.route(
                    "replace",
                    family=family_of(network.version),
                    dst=str(network),
                    type="unreachable",
                    priority=_LAST_METRIC,
                    proto=_PROTOCOL,
                )


async def make(
    slot: int,
    ranges: RelayRanges,
    netns: Netns,
    *,
    gate: Callable[[int], Awaitable[None]],
) -> VethPair:
    """Connect the relay in `netns` with the host.

    gate: awaited with the ifindex of the host's end, before a packet can pass. Raises `PairError`;
    then there is no pair.
    """
    name = relay_interfaces.name_of(slot)
    async with _pair_errors(f"cannot create {name}"), pyroute2.AsyncIPRoute() as netlink:
        with _descriptor(netns) as fd:
            peer = {"ifname": INSIDE, "net_ns_fd": fd}
            await netlink.link("add", ifname=name, kind="veth", peer=peer)
        try:
            link = (await netlink.link("get", ifname=name))[0]
            ifindex = int(link["index"])
            await gate(ifindex)
            async with _netlink_in(netns) as inside:
                inner_link = (await inside.link("get", ifname=INSIDE))[0]
                shares = [
                    s
                    for s in strict_ranges.shares(ranges, slot)
                    if network_setup.has_ip_version(s.subnet.version)
                ]
                await _set_up_inside(inside, netns, inner_link, link, shares)
                pair = VethPair(
                    slot,
                    ifindex,
                    name,
                    tuple(shares),
                    inside_address=inner_link.get("address"),
                    address=link.get("address"),
                    mtu=link.get("mtu"),
                )
                await _set_up_host(netlink, pair)
                await _wait_until_active(inside, inner_link["index"])
        except BaseException:
            with contextlib.suppress(pyroute2.NetlinkError):
                await netlink.link("del", ifname=name)
            raise
    return pair


async def repair(pair: VethPair) -> None:
    """Restore what other programs may have taken from the host's end: link with its address and
    MTU, addresses, neighbours, routes. Raises `PairError`."""
    async with _pair_errors(f"cannot repair {pair.name}"), pyroute2.AsyncIPRoute() as netlink:
        await _set_up_host(netlink, pair)


async def diversion(pair: VethPair) -> str:
    """How routes and rules of the node, such as a VPN's, lead packets to the relay elsewhere: a
    clause with a semicolon before it; "" if they do not, or that cannot be found out."""
    with contextlib.suppress(PairError):
        async with _pair_errors("cannot read routes"), pyroute2.AsyncIPRoute() as netlink:
            for share in pair.shares:
                try:
                    query = network_setup.route_query(share.inside)
                    (route,) = await netlink.route("get", **query)
                except pyroute2.NetlinkError as error:
                    return (
                        f"; the node's routing rejects {share.subnet} ({os.strerror(error.code)})"
                    )
                ifindex = route.get("oif")
                if ifindex not in (None, pair.ifindex):
                    name = dict(socket.if_nameindex()).get(ifindex, "another interface")
                    return (
                        f"; the node's routing (table {route.get('table')}) leads {share.subnet} to"
                        f" {name}, not to {pair.name}: check 'ip rule'"
                    )
    return ""


def _netlink_in(netns: Netns) -> pyroute2.AsyncIPRoute:
    # asyncio, which pyroute2 uses, accepts only datagram sockets; netlink makes no difference.
    sock = netns.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, socket.NETLINK_ROUTE)
    return pyroute2.AsyncIPRoute(fileno=sock.detach())


async def remove(ifindex: int) -> None:
    """Remove a pair, if it exists. Raises `PairError`."""
    async with _pair_errors("cannot remove a relay interface"), pyroute2.AsyncIPRoute() as netlink:
        if ifindex in relay_interfaces.present():
            with contextlib.suppress(pyroute2.NetlinkError):
                await netlink.link("del", index=ifindex)


async def remove_everything() -> int:
    """Remove all pairs and routes of relays on this node; return how many.

    Raises `PairError`.
    """
    present = relay_interfaces.present()
    for ifindex in present:
        await remove(ifindex)
    async with _pair_errors("cannot remove the relay's range"), pyroute2.AsyncIPRoute() as netlink:
        return len(present) + await _remove_ranges(netlink, set())


async def _set_up_inside(
    inside: pyroute2.AsyncIPRoute, netns: Netns, own: Any, node: Any, shares: list[RangeShare]
) -> None:
    for interface in ("all", "default", INSIDE):
        _write_settings(_INSIDE_SETTINGS, interface, netns.set_sysctl)
    loopback = (await inside.link("get", ifname="lo"))[0]["index"]
    for ifindex in (loopback, own["index"]):
        await inside.link("set", index=ifindex, state="up")
    for share in shares:
        family = family_of(share.subnet.version)
        await _add_address(inside, own["index"], share.inside)
        await _add_neighbour(inside, own["index"], share.node, node.get("address"))
        # AnyIP: the whole share is local, without an address for each target, except the host's.
        for destination, kind, scope, ifindex in (
            (share.subnet, "local", "host", loopback),
            (f"{share.node}/{share.node.max_prefixlen}", "unicast", "link", own["index"]),
        ):
            await inside.route(
                "add",
                family=family,
                dst=str(destination),
                type=kind,
                scope=scope,
                table=_LOCAL_TABLE,
                oif=ifindex,
            )
        await inside.route(
            "add",
            family=family,
            dst="default",
            gateway=str(share.node),
            oif=own["index"],
            flags=_ONLINK,
        )


async def _set_up_host(netlink: pyroute2.AsyncIPRoute, pair: VethPair) -> None:
    """Idempotent."""
    # First, since an interface with less than 1280 bytes has no IPv6, nor settings of it.
    await netlink.link("set", index=pair.ifindex, state="up", address=pair.address, mtu=pair.mtu)
    _write_settings(_HOST_SETTINGS, pair.name, network_setup.write_sysctl)
    for share in pair.shares:
        await _add_address(netlink, pair.ifindex, share.node)
        await _add_neighbour(netlink, pair.ifindex, share.inside, pair.inside_address)
        await netlink.route(
            "replace",
            family=family_of(share.subnet.version),
            dst=str(share.subnet),
            gateway=str(share.inside),
            oif=pair.ifindex,
            flags=_ONLINK,
            prefsrc=str(share.node),
            proto=_PROTOCOL,
        )


async def _wait_until_active(netlink: pyroute2.AsyncIPRoute, ifindex: int) -> None:
    """Until the interface, which was up before its peer, sends packets.

    The kernel activates it, and drops what it would send until then, when a work queue gets RTNL
    (net/core/link_watch.c); the operational state changes at the same time. Linux 6.18 does that
    work for this request.
    """
    while (await netlink.link("get", index=ifindex))[0].get("operstate") != "UP":  # noqa: ASYNC110
        await asyncio.sleep(network_setup.LOCAL_POLL_SECONDS)


async def _add_address(netlink: pyroute2.AsyncIPRoute, ifindex: int, address: IPAddress) -> None:
    request = network_setup.address_request(ifindex, address, has_prefix_route=False)
    await netlink.addr("replace", **request)
    while not await _is_local(netlink, address):  # noqa: ASYNC110
        await asyncio.sleep(network_setup.LOCAL_POLL_SECONDS)


async def _is_local(netlink: pyroute2.AsyncIPRoute, address: IPAddress) -> bool:
    try:
        found = await netlink.route("get", **network_setup.route_query(address))
    except pyroute2.NetlinkError:
        return False
    return network_setup.is_local(found)


async def _add_neighbour(
    netlink: pyroute2.AsyncIPRoute, ifindex: int, address: IPAddress, link_address: str
) -> None:
    request = network_setup.neighbour_request(ifindex, address, link_address)
    await netlink.neigh("replace", **request)


async def _foreign_routes(netlink: pyroute2.AsyncIPRoute) -> Any:
    """The node's routes in all tables, with those to its own addresses, without the relays'."""
    names = dict(socket.if_nameindex())
    for family in (socket.AF_INET, socket.AF_INET6):
        async for route in await netlink.get_routes(family=family):
            device = names.get(route.get("oif"), "")
            if route["proto"] == _PROTOCOL or relay_interfaces.is_relay_interface(device):
                continue
            if destination := route.get("dst"):
                network = ipaddress.ip_network(f"{destination}/{route['dst_len']}")
                yield Route(network, f"{network} dev {device}" if device else str(network))


async def _remove_ranges(netlink: pyroute2.AsyncIPRoute, kept: set[str]) -> int:
    """Remove podgate's unreachable routes, except those to these destinations; return how many."""
    removed = 0
    for family in (socket.AF_INET, socket.AF_INET6):
        routes = [route async for route in await netlink.get_routes(family=family)]
        for route in routes:
            is_podgates = route["proto"] == _PROTOCOL and route.get("priority") == _LAST_METRIC
            destination = f"{route.get('dst')}/{route['dst_len']}"
            if is_podgates and destination not in kept:
                await netlink.route(
                    "del",
                    family=family,
                    dst=destination,
                    type="unreachable",
                    priority=_LAST_METRIC,
                    proto=_PROTOCOL,
                )
                removed += 1
    return removed


def _write_settings(
    settings: dict[str, dict[str, str]], interface: str, write: Callable[[str, str], None]
) -> None:
    for family, values in settings.items():
        for name, value in values.items():
            # A kernel without IPv6, or too old for one of them.
            with contextlib.suppress(FileNotFoundError):
                write(f"{family}/conf/{interface}/{name}", value)


@contextlib.contextmanager
def _descriptor(netns: Netns) -> Iterator[int]:
    fd = os.open(netns.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.asynccontextmanager
async def _pair_errors(failure: str) -> Any:
    """A time limit, and errors as `PairError`. failure: what cannot be done."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            yield
    except TimeoutError as error:
        raise PairError(
            f"{failure}: netlink did not respond within {_TIMEOUT_SECONDS} s."
        ) from error
    except pyroute2.NetlinkError as error:
        raise PairError(f"{failure}: {os.strerror(error.code)}.") from error
    except (OSError, NetnsError) as error:
        raise PairError(f"{failure}: {error}.") from error
