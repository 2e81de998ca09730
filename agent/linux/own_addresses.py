"""The addresses that the node has itself: those of its interfaces, and ranges of local routes.

Not those of services: kube-proxy in ipvs mode gives all of them to one interface, and podgate's
ipvs backend has local routes of its own for them.
"""

import ipaddress
import socket
import struct
from collections.abc import Iterable

from agent.linux import netlink
from agent.linux.procfs import raise_own
from agent.linux.rtnetlink import Link
from bpf.abi import IPNetwork
from bpf.netlink import HEADER_BYTES, attribute, attributes

# include/uapi/linux/rtnetlink.h and if_addr.h
_RTM_GETADDR, _RTM_GETROUTE = 22, 26
_IFADDR = struct.Struct("=BBBBI")  # family, bits, flags, scope, interface
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
# family, lengths of destination and source, tos, table, protocol, scope, type, flags
_ROUTE = struct.Struct("=BBBBBBBBI")
_RTA_DST, _RTA_TABLE = 1, 15
_TABLE_LOCAL, _TYPE_LOCAL = 255, 2
# Of administrators (`ip route add local`). The kernel's own are those of addresses.
_ADDED = frozenset({3, 4})  # RTPROT_BOOT, RTPROT_STATIC
_SERVICES_INTERFACE = "kube-ipvs0"


async def read(links: Iterable[Link]) -> set[IPNetwork]:
    """links: the node's. Raises `OSError`."""
    of_services = {link.index for link in links if link.name == _SERVICES_INTERFACE}
    return await netlink.within(lambda host: _read(host, of_services), is_filtered=True)


def _read(host: netlink.Exchange, left_out: set[int]) -> set[IPNetwork]:
    found = _of_interfaces(host, left_out)
    for family in (socket.AF_INET, socket.AF_INET6):
        found |= _of_routes(host, family)
    return found


def _of_interfaces(host: netlink.Exchange, left_out: set[int]) -> set[IPNetwork]:
    messages = host.dump(_RTM_GETADDR, _IFADDR.pack(0, 0, 0, 0, 0))
    return {
        address
        for ifindex, address in _addresses.of(messages)
        if address is not None and ifindex not in left_out
    }


def _parse(message: bytes) -> tuple[int, IPNetwork | None]:
    """The interface, and its address."""
    *_, ifindex = _IFADDR.unpack_from(message, HEADER_BYTES)
    values = attributes(message, HEADER_BYTES + _IFADDR.size)
    # With a peer, IFA_ADDRESS is the peer's.
    packed = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)
    return ifindex, ipaddress.ip_network(packed) if packed else None


_addresses = netlink.ParsedDump(_parse)


def _of_routes(host: netlink.Exchange, family: int) -> set[IPNetwork]:
    """None on a node without the family (ipv6.disable=1). Raises `OSError`."""
    body = _ROUTE.pack(family, 0, 0, 0, _TABLE_LOCAL, 0, 0, _TYPE_LOCAL, 0)
    body += attribute(_RTA_TABLE, struct.pack("=I", _TABLE_LOCAL))
    try:
        routes = host.dump(_RTM_GETROUTE, body)
    except OSError as error:
        raise_own(error)
        return set()
    found = set()
    for message in routes:
        _, bits, _, _, table, origin, _, kind, _ = _ROUTE.unpack_from(message, HEADER_BYTES)
        destination = attributes(message, HEADER_BYTES + _ROUTE.size).get(_RTA_DST)
        if (table, kind) == (_TABLE_LOCAL, _TYPE_LOCAL) and origin in _ADDED and destination:
            found.add(ipaddress.ip_network((destination, bits)))
    return found
