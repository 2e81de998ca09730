"""The connections that netfilter tracks; deletes UDP flows that it would still translate to an
endpoint that was removed.

Netfilter evaluates only a flow's first packet, and UDP has no close: a client that sends again from
the same port would never reach another endpoint. kube-proxy does the same (pkg/proxy/conntrack).
"""

import asyncio
import contextlib
import pathlib
import socket
from collections.abc import Collection, Mapping

import structlog
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

from agent.logs import Event
from agent.services.proxy.frontends import FrontendChange
from bpf.services.tables import ServiceAddress

log = structlog.get_logger(__name__)

_COUNT = pathlib.Path("/proc/sys/net/netfilter/nf_conntrack_count")
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


def is_tracking() -> bool:
    """Whether the kernel tracks connections of this process's network namespace."""
    try:
        return int(_COUNT.read_text(encoding="ascii")) > 0
    except FileNotFoundError:
        return False


async def follow(change: FrontendChange) -> None:
    """Delete the flows that a change leaves with an endpoint that their service no longer has.

    A failure is logged: such flows expire by themselves.
    """
    endpoints = {
        address: {*change.changed[address].endpoints, *change.changed[address].outside}
        if address in change.changed
        else set()
        for address in (*change.changed, *change.removed)
        if address.protocol == socket.IPPROTO_UDP
    }
    try:
        await asyncio.to_thread(delete_stale, endpoints)
    except (OSError, NetlinkError) as error:
        log.warning(Event.STALE_CONNTRACK_NOT_REMOVED, error=str(error))


def delete_stale(addresses: Mapping[ServiceAddress, Collection[ServiceAddress]]) -> int:
    """Delete the flows to each address, except those to one of its endpoints; returns their number.

    Blocks; the kernel iterates over all tracked flows once for each address. Raises `OSError` or
    `NetlinkError`.
    """
    count = 0
    for version, family in _FAMILIES.items():
        own = {
            address: kept
            for address, kept in addresses.items()
            if address.address.version == version
        }
        if not own:
            continue
        with NFCTSocket(nfgen_family=family) as netlink:
            for address, kept in own.items():
                count += _delete(netlink, family, address, kept)
    return count


def _delete(
    netlink: NFCTSocket, family: int, address: ServiceAddress, kept: Collection[ServiceAddress]
) -> int:
    service = NFCTAttrTuple(
        family=family, daddr=str(address.address), proto=address.protocol, dport=address.port
    )
    endpoints = {(str(endpoint.address), endpoint.port) for endpoint in kept}
    stale = []
    # The kernel filters by protocol and port; with an IPv6 address it finds nothing.
    tuple_filter = NFCTAttrTuple(family=family, proto=address.protocol, dport=address.port)
    for entry in netlink.dump(tuple_orig=tuple_filter):
        original, reply = (
            NFCTAttrTuple.from_netlink(family, entry.get_attr(name))
            for name in ("CTA_TUPLE_ORIG", "CTA_TUPLE_REPLY")
        )
        if service == original and (reply.saddr, reply.sport) not in endpoints:
            stale.append(original)
    for original in stale:
        with contextlib.suppress(NetlinkError):  # it expired meanwhile
            netlink.entry("del", tuple_orig=original)
    return len(stale)
