"""Addresses that the node takes for its own by local routes, without having them. Calls block."""

import errno
import ipaddress
import socket
import struct

from bpf import netlink
from bpf.abi import IPAddress
from bpf.netlink import HEADER_BYTES, NLM_F_CREATE, NLM_F_EXCL, NetlinkError, attribute, attributes

# include/uapi/linux/rtnetlink.h
_RTM_NEWROUTE, _RTM_DELROUTE, _RTM_GETROUTE = 24, 25, 26
# family, lengths of destination and source, tos, table, protocol, scope, type, flags
_ROUTE = struct.Struct("=BBBBBBBBI")
_RTA_DST, _RTA_OIF = 1, 4
_TABLE_LOCAL, _SCOPE_HOST, _TYPE_LOCAL = 255, 254, 2
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_U32 = struct.Struct("=I")
# A node without IPv6 has no such table (ipv6.disable=1).
_NO_TABLE = (errno.EOPNOTSUPP, errno.EAFNOSUPPORT)


class LocalRoutes:
    """Those of one origin, in the network namespace of the thread that creates it."""

    def __init__(self, origin: int) -> None:
        """origin: a number that rtnetlink.h does not assign (RTPROT_*), as `ip route` shows it."""
        self._origin = origin
        self._loopback = _U32.pack(socket.if_nametoindex("lo"))
        self._netlink = netlink.RequestSocket()

    def close(self) -> None:
        self._netlink.close()

    def addresses(self) -> list[IPAddress]:
        """Raises `NetlinkError`."""
        found: list[IPAddress] = []
        for family in _FAMILIES.values():
            try:
                routes = self._netlink.dump(_RTM_GETROUTE, _ROUTE.pack(family, *[0] * 8))
            except NetlinkError as error:
                if error.errno not in _NO_TABLE:
                    raise
                continue
            for route in routes:
                _, _, _, _, table, origin, _, _, _ = _ROUTE.unpack_from(route, HEADER_BYTES)
                if (table, origin) == (_TABLE_LOCAL, self._origin):
                    found_attributes = attributes(route, HEADER_BYTES + _ROUTE.size)
                    found.append(ipaddress.ip_address(found_attributes[_RTA_DST]))
        return found

    def add(self, address: IPAddress) -> None:
        """The node's own addresses have such a route already. Raises `NetlinkError`."""
        flags = NLM_F_CREATE | NLM_F_EXCL
        self._change(_RTM_NEWROUTE, flags, address, ignored=errno.EEXIST)

    def remove(self, address: IPAddress) -> None:
        """One that is gone is no error. Raises `NetlinkError`."""
        self._change(_RTM_DELROUTE, 0, address, ignored=errno.ESRCH)

    def _change(self, kind: int, flags: int, address: IPAddress, *, ignored: int) -> None:
        body = _ROUTE.pack(
            *(_FAMILIES[address.version], address.max_prefixlen, 0, 0),
            *(_TABLE_LOCAL, self._origin, _SCOPE_HOST, _TYPE_LOCAL, 0),
        )
        body += attribute(_RTA_DST, address.packed) + attribute(_RTA_OIF, self._loopback)
        try:
            self._netlink.change(kind, flags, body)
        except NetlinkError as error:
            if error.errno != ignored:
                raise
