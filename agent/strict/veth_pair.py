"""The veth pair that connects a relay's network namespace with the host.

The host's end is gated before it is up. Addresses of the relay's range that no relay uses are
unreachable: a connect to them must fail here, and not leave by the default route. Neighbours are
permanent, so the pair needs neither ARP nor neighbour discovery, and accepts nothing from outside.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from agent.errors import PodgateError
from agent.linux import link_setup, network_setup, route_messages
from agent.linux.route_messages import LinkState
from agent.relay import interfaces as relay_interfaces
from agent.settings import RelayRanges
from agent.strict import ranges as strict_ranges
from agent.strict.ranges import RangeShare, Route
from bpf.abi import IPAddress, IPNetwork
from bpf.netlink import NetlinkError
from probes.netns import Netns, NetnsError

INSIDE = "node0"
"""Name of the pair's end in the relay's namespace."""

_TIMEOUT_SECONDS = 10

# Origin of podgate's routes, as `ip route` shows it; a number that rtnetlink.h does not assign.
_PROTOCOL = 112
# Lower priority than any route of the node's owner.
_LAST_METRIC = 4_000_000_000

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
    inside_address: bytes
    """The link address of the relay's end."""
    address: bytes
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
    async with _pair_errors("cannot read the node's routes"):
        routes = [route async for route in _foreign_routes()]
    return strict_ranges.find_overlap(ranges, routes)


async def add_range_routes(ranges: RelayRanges) -> None:
    """Reserve the ranges for relays: unreachable except through their pairs. The routes stay when
    the relays exit.

    Raises `PairError`, also if the node already uses a range.
    """
    if problem := await overlap(ranges):
        raise PairError(problem)
    await ensure_range_routes(ranges)
    async with _pair_errors("cannot remove a previous relay range"):
        await _remove_ranges(set(ranges.networks))


async def ensure_range_routes(ranges: RelayRanges) -> None:
    """Restore routes that another program removed, without reading all routes of the node.

    Raises `PairError`.
    """
    async with _pair_errors("cannot reserve the relay's range"):
        for network in ranges.networks:
            if network_setup.has_ip_version(network.version):
                await link_setup.set_route(_unreachable(network))


def _unreachable(network: IPNetwork) -> route_messages.Route:
    return route_messages.Route(
        network, type=route_messages.UNREACHABLE, metric=_LAST_METRIC, protocol=_PROTOCOL
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
    async with _pair_errors(f"cannot create {name}"):
        await link_setup.add_pair(name, INSIDE, netns)
        try:
            own = await link_setup.link(name)
            await gate(own.index)
            inner = await link_setup.link(INSIDE, netns)
            shares = [
                s
                for s in strict_ranges.shares(ranges, slot)
                if network_setup.has_ip_version(s.subnet.version)
            ]
            await _set_up_inside(netns, inner, own, shares)
            pair = VethPair(
                slot,
                own.index,
                name,
                tuple(shares),
                inside_address=inner.address,
                address=own.address,
                mtu=own.mtu,
            )
            await _set_up_host(pair)
            await _wait_until_active(netns)
        except BaseException:
            with contextlib.suppress(NetlinkError):
                await link_setup.delete_link(name=name)
            raise
    return pair


async def repair(pair: VethPair) -> None:
    """Restore what other programs may have taken from the host's end: link with its address and
    MTU, addresses, neighbours, routes. Raises `PairError`."""
    async with _pair_errors(f"cannot repair {pair.name}"):
        await _set_up_host(pair)


async def diversion(pair: VethPair) -> str:
    """How routes and rules of the node, such as a VPN's, lead packets to the relay elsewhere: a
    clause with a semicolon before it; "" if they do not, or that cannot be found out."""
    with contextlib.suppress(PairError):
        async with _pair_errors("cannot read routes"):
            for share in pair.shares:
                try:
                    route = await link_setup.route_to(share.inside)
                except NetlinkError as error:
                    return f"; the node's routing rejects {share.subnet} ({error.strerror})"
                if route.ifindex not in (0, pair.ifindex):
                    names = dict(socket.if_nameindex())
                    return (
                        f"; the node's routing (table {route.table}) leads {share.subnet} to"
                        f" {names.get(route.ifindex, 'another interface')}, not to {pair.name}:"
                        " check 'ip rule'"
                    )
    return ""


async def remove(ifindex: int) -> None:
    """Remove a pair, if it exists. Raises `PairError`."""
    async with _pair_errors("cannot remove a relay interface"):
        if ifindex in relay_interfaces.present():
            with contextlib.suppress(NetlinkError):
                await link_setup.delete_link(ifindex=ifindex)


async def remove_everything() -> int:
    """Remove all pairs and routes of relays on this node; return how many.

    Raises `PairError`.
    """
    present = relay_interfaces.present()
    for ifindex in present:
        await remove(ifindex)
    async with _pair_errors("cannot remove the relay's range"):
        return len(present) + await _remove_ranges(set())


async def _set_up_inside(
    netns: Netns, own: LinkState, node: LinkState, shares: list[RangeShare]
) -> None:
    for interface in ("all", "default", INSIDE):
        _write_settings(_INSIDE_SETTINGS, interface, netns.set_sysctl)
    loopback = (await link_setup.link("lo", netns)).index
    for ifindex in (loopback, own.index):
        await link_setup.set_up(ifindex, netns)
    for share in shares:
        await _add_address(own.index, share.inside, netns)
        await link_setup.set_neighbour(own.index, share.node, node.address, netns)
        # AnyIP: the whole share is local, without an address for each target, except the host's.
        for route in (
            route_messages.Route(
                share.subnet,
                type=route_messages.LOCAL,
                scope=route_messages.HOST,
                table=route_messages.LOCAL_TABLE,
                ifindex=loopback,
            ),
            route_messages.Route(
                ipaddress.ip_network(share.node),
                scope=route_messages.LINK,
                table=route_messages.LOCAL_TABLE,
                ifindex=own.index,
            ),
            route_messages.Route(
                _everything(share), gateway=share.node, ifindex=own.index, is_on_link=True
            ),
        ):
            await link_setup.set_route(route, netns, flags=link_setup.ADD)


def _everything(share: RangeShare) -> IPNetwork:
    return share.subnet.supernet(new_prefix=0)


async def _set_up_host(pair: VethPair) -> None:
    """Idempotent."""
    # First, since an interface with less than 1280 bytes has no IPv6, nor settings of it.
    await link_setup.set_up(pair.ifindex, address=pair.address, mtu=pair.mtu)
    _write_settings(_HOST_SETTINGS, pair.name, network_setup.write_sysctl)
    for share in pair.shares:
        await _add_address(pair.ifindex, share.node)
        await link_setup.set_neighbour(pair.ifindex, share.inside, pair.inside_address)
        await link_setup.set_route(
            route_messages.Route(
                share.subnet,
                gateway=share.inside,
                ifindex=pair.ifindex,
                is_on_link=True,
                source=share.node,
                protocol=_PROTOCOL,
            )
        )


async def _wait_until_active(netns: Netns) -> None:
    """Until the relay's end, which was up before its peer, sends packets.

    The kernel activates it, and drops what it would send until then, when a work queue gets RTNL
    (net/core/link_watch.c); the operational state changes at the same time. Linux 6.18 does that
    work for this request.
    """
    while not (await link_setup.link(INSIDE, netns)).is_active:  # noqa: ASYNC110
        await asyncio.sleep(network_setup.LOCAL_POLL_SECONDS)


async def _add_address(ifindex: int, address: IPAddress, netns: Netns | None = None) -> None:
    await link_setup.set_address(ifindex, address, netns)
    while not await link_setup.is_local(address, netns):  # noqa: ASYNC110
        await asyncio.sleep(network_setup.LOCAL_POLL_SECONDS)


async def _foreign_routes() -> AsyncIterator[Route]:
    """The node's routes in all tables, with those to its own addresses, without the relays'."""
    names = dict(socket.if_nameindex())
    for family in (socket.AF_INET, socket.AF_INET6):
        for route in await link_setup.routes(family):
            device = names.get(route.ifindex, "")
            if route.protocol == _PROTOCOL or relay_interfaces.is_relay_interface(device):
                continue
            network = route.destination
            yield Route(network, f"{network} dev {device}" if device else str(network))


async def _remove_ranges(kept: set[IPNetwork]) -> int:
    """Remove podgate's unreachable routes, except those to these destinations; return how many."""
    removed = 0
    for family in (socket.AF_INET, socket.AF_INET6):
        for route in await link_setup.routes(family):
            is_podgates = route.protocol == _PROTOCOL and route.metric == _LAST_METRIC
            if is_podgates and route.destination not in kept:
                await link_setup.delete_route(_unreachable(route.destination))
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
    except NetlinkError as error:
        raise PairError(f"{failure}: {error.strerror}.") from error
    except (OSError, NetnsError) as error:
        raise PairError(f"{failure}: {error}.") from error
