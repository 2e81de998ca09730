"""The pair of interfaces by which a relay's network namespace hangs on the node.

The node's end is gated before it is up, and the relay's range is unreachable wherever no relay
takes it: a connect to it must end here and not leave by the default route. Neighbours are
permanent, so neither ARP nor neighbour discovery is needed, and nothing is learnt from outside.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import os
import pathlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pyroute2

from agent.errors import PodgateError
from agent.linux.pod_network import netlink_in
from agent.relay import interfaces as relay_interfaces
from agent.settings import RelayRanges
from agent.strict import ranges as strict_ranges
from agent.strict.ranges import Route, Share
from probes.netns import Netns, NetnsError

INSIDE = "node0"
"""The pair's end in the relay's namespace."""

_TIMEOUT_SECONDS = 10

# Who put a route there, as `ip route` shows it; a number that rtnetlink.h gives to nobody.
_PROTOCOL = 112
# After whatever the node's owner may want.
_LAST_METRIC = 4_000_000_000
_ONLINK = 4  # RTNH_F_ONLINK
_RTN_LOCAL = 2
_ROUTE_PAUSE_SECONDS = 0.002
_LOCAL_TABLE = 255
_NUD_PERMANENT = 0x80
_IFA_F_NODAD, _IFA_F_NOPREFIXROUTE = 0x02, 0x200
_SYSCTL = pathlib.Path("/proc/sys/net")

# Of the node's end. Nothing that comes out of the relay is forwarded, and routers are not heard.
_NODE_SETTINGS = {
    "ipv4": {"forwarding": "0", "accept_local": "0"},
    "ipv6": {"disable_ipv6": "0", "accept_ra": "0", "addr_gen_mode": "1", "forwarding": "0"},
}
# Within. What comes in is meant for any of the range, from an address that only the node has.
_INSIDE_SETTINGS = {
    "ipv4": {"rp_filter": "0"},
    "ipv6": {"disable_ipv6": "0", "accept_ra": "0", "addr_gen_mode": "1", "accept_dad": "0"},
}


class PairError(PodgateError):
    """The node cannot be joined to a relay; the message is one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One that stands. ifindex: of the node's end."""

    slot: int
    ifindex: int
    name: str


def reserve_slot() -> int:
    """The slot of the next relay. Raises `PairError`."""
    slots = map(relay_interfaces.slot_of, relay_interfaces.present().values())
    slot = strict_ranges.free_slot([slot for slot in slots if slot is not None])
    if slot is None:
        raise PairError(
            f"{strict_ranges.SLOTS} relays still carry what they began; ask again in a minute."
        )
    return slot


async def overlap(ranges: RelayRanges) -> str | None:
    """One sentence where the node uses these ranges already. Raises `PairError`."""
    async with _said("the node's routes cannot be read"), pyroute2.AsyncIPRoute() as netlink:
        routes = [route async for route in _foreign_routes(netlink)]
    return strict_ranges.find_overlap(ranges, routes)


async def claim_range(ranges: RelayRanges) -> None:
    """Have the range for the relays alone: unreachable but by their pairs. It outlives them.

    Raises `PairError` where the node uses it already.
    """
    if problem := await overlap(ranges):
        raise PairError(problem)
    await keep_range(ranges)
    async with _said("a range of earlier cannot be given back"), pyroute2.AsyncIPRoute() as netlink:
        await _remove_ranges(netlink, {str(network) for network in ranges.networks})


async def keep_range(ranges: RelayRanges) -> None:
    """Put back what somebody may have taken away; without a look at all routes, which may be many.

    Raises `PairError`.
    """
    async with _said("the relay's range cannot be set apart"), pyroute2.AsyncIPRoute() as netlink:
        for network in ranges.networks:
            if _has_family(network.version):
                await netlink.route(
                    "replace",
                    family=_family(network.version),
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
) -> Pair:
    """Join the relay in `netns` to the node.

    gate: awaited with the ifindex of the node's end, before anything can come through. Raises
    `PairError`; then there is no pair.
    """
    name = relay_interfaces.name_of(slot)
    async with _said(f"{name} cannot be made"), pyroute2.AsyncIPRoute() as netlink:
        with _descriptor(netns) as fd:
            peer = {"ifname": INSIDE, "net_ns_fd": fd}
            await netlink.link("add", ifname=name, kind="veth", peer=peer)
        try:
            link = (await netlink.link("get", ifname=name))[0]
            pair = Pair(slot, int(link["index"]), name)
            await gate(pair.ifindex)
            async with netlink_in(netns) as inside:
                within = (await inside.link("get", ifname=INSIDE))[0]
                shares = [
                    s for s in strict_ranges.shares(ranges, slot) if _has_family(s.subnet.version)
                ]
                await _set_up_within(inside, netns, within, link, shares)
                await _set_up_node(netlink, link, within, shares)
        except BaseException:
            with contextlib.suppress(pyroute2.NetlinkError):
                await netlink.link("del", ifname=name)
            raise
    return pair


async def remove(ifindex: int) -> None:
    """Take one away; nothing happens where it is gone. Raises `PairError`."""
    async with _said("a relay's interface cannot be removed"), pyroute2.AsyncIPRoute() as netlink:
        if ifindex in relay_interfaces.present():
            with contextlib.suppress(pyroute2.NetlinkError):
                await netlink.link("del", index=ifindex)


async def remove_everything() -> int:
    """Every pair and every route that any relay's agent left on this node; how many.

    Raises `PairError`.
    """
    present = relay_interfaces.present()
    for ifindex in present:
        await remove(ifindex)
    async with _said("the range cannot be given back"), pyroute2.AsyncIPRoute() as netlink:
        return len(present) + await _remove_ranges(netlink, set())


async def _set_up_within(
    inside: pyroute2.AsyncIPRoute, netns: Netns, own: Any, node: Any, shares: list[Share]
) -> None:
    for place in ("all", "default", INSIDE):
        _write_settings(_INSIDE_SETTINGS, place, netns.set_sysctl)
    loopback = (await inside.link("get", ifname="lo"))[0]["index"]
    for ifindex in (loopback, own["index"]):
        await inside.link("set", index=ifindex, state="up")
    for share in shares:
        family = _family(share.subnet.version)
        await _add_address(inside, own["index"], share.inside)
        await _add_neighbour(inside, own["index"], share.node, node.get("address"))
        # AnyIP: all of the share is here, without an address for each target; but not the node's.
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


async def _set_up_node(
    netlink: pyroute2.AsyncIPRoute, own: Any, within: Any, shares: list[Share]
) -> None:
    _write_settings(_NODE_SETTINGS, own.get("ifname"), _write_sysctl)
    await netlink.link("set", index=own["index"], state="up")
    for share in shares:
        await _add_address(netlink, own["index"], share.node)
        await _add_neighbour(netlink, own["index"], share.inside, within.get("address"))
        await netlink.route(
            "add",
            family=_family(share.subnet.version),
            dst=str(share.subnet),
            gateway=str(share.inside),
            oif=own["index"],
            flags=_ONLINK,
            prefsrc=str(share.node),
            proto=_PROTOCOL,
        )


async def _add_address(netlink: pyroute2.AsyncIPRoute, ifindex: int, address: Any) -> None:
    nodad = _IFA_F_NODAD if address.version == 6 else 0
    await netlink.addr(
        "add",
        index=ifindex,
        address=str(address),
        prefixlen=address.max_prefixlen,
        flags=_IFA_F_NOPREFIXROUTE | nodad,
    )
    # Of IPv6 the kernel adds the route in a worker of its own (addrconf_dad_work,
    # net/ipv6/addrconf.c), without a word; until then answers to this address find no way in.
    while not await _is_local(netlink, address):  # noqa: ASYNC110
        await asyncio.sleep(_ROUTE_PAUSE_SECONDS)


async def _is_local(netlink: pyroute2.AsyncIPRoute, address: Any) -> bool:
    try:
        found = await netlink.route("get", dst=str(address), family=_family(address.version))
    except pyroute2.NetlinkError:
        return False
    return bool(found[0]["type"] == _RTN_LOCAL)


async def _add_neighbour(
    netlink: pyroute2.AsyncIPRoute, ifindex: int, address: Any, link_address: str
) -> None:
    await netlink.neigh(
        "replace",
        family=_family(address.version),
        dst=str(address),
        lladdr=link_address,
        ifindex=ifindex,
        state=_NUD_PERMANENT,
    )


async def _foreign_routes(netlink: pyroute2.AsyncIPRoute) -> Any:
    """The node's routes in all tables, those to its own addresses too, but for the relays'."""
    names = dict(socket.if_nameindex())
    for family in (socket.AF_INET, socket.AF_INET6):
        async for route in await netlink.get_routes(family=family):
            device = names.get(route.get("oif"), "")
            if route["proto"] == _PROTOCOL or relay_interfaces.is_relay_interface(device):
                continue
            if destination := route.get("dst"):
                network = ipaddress.ip_network(f"{destination}/{route['dst_len']}")
                yield Route(network, f"{network} dev {device}" if device else str(network))


async def _remove_ranges(netlink: pyroute2.AsyncIPRoute, but: set[str]) -> int:
    """Remove unreachable routes of ours: those of a range that was changed, or all."""
    removed = 0
    for family in (socket.AF_INET, socket.AF_INET6):
        routes = [route async for route in await netlink.get_routes(family=family)]
        for route in routes:
            is_ours = route["proto"] == _PROTOCOL and route.get("priority") == _LAST_METRIC
            destination = f"{route.get('dst')}/{route['dst_len']}"
            if is_ours and destination not in but:
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
    settings: dict[str, dict[str, str]], place: str, write: Callable[[str, str], None]
) -> None:
    for family, values in settings.items():
        for name, value in values.items():
            # A kernel without IPv6, or too old for one of them.
            with contextlib.suppress(FileNotFoundError):
                write(f"{family}/conf/{place}/{name}", value)


def _write_sysctl(name: str, value: str) -> None:
    (_SYSCTL / name).write_text(value, encoding="ascii")


def _has_family(version: int) -> bool:
    return (_SYSCTL / f"ipv{version}").exists()


def _family(version: int) -> int:
    return socket.AF_INET if version == 4 else socket.AF_INET6


@contextlib.contextmanager
def _descriptor(netns: Netns) -> Iterator[int]:
    fd = os.open(netns.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.asynccontextmanager
async def _said(what: str) -> Any:
    """Within the time limit, or with one sentence about what went wrong."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            yield
    except TimeoutError as error:
        raise PairError(f"{what}: netlink did not answer within {_TIMEOUT_SECONDS} s.") from error
    except pyroute2.NetlinkError as error:
        raise PairError(f"{what}: {os.strerror(error.code)}.") from error
    except (OSError, NetnsError) as error:
        raise PairError(f"{what}: {error}.") from error
