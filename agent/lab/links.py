"""Interfaces, addresses and routes of one network namespace, set up by route netlink. Calls block.

A pod of the lab takes some twenty requests. By pyroute2 they take 6 ms of CPU time more, and the
tests make thousands of pods.
"""

import errno
import os
import socket
import struct
import time

from agent.linux import network_setup
from agent.linux.network_setup import family_of
from bpf.abi import IPAddress
from bpf.netlink import (
    HEADER_BYTES,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NetlinkError,
    RequestSocket,
    attribute,
)
from probes.netns import Netns

# include/uapi/linux/rtnetlink.h, if_link.h, if_addr.h, veth.h
_RTM_NEWLINK, _RTM_DELLINK, _RTM_GETLINK = 16, 17, 18
_RTM_NEWADDR, _RTM_DELADDR, _RTM_NEWROUTE, _RTM_GETROUTE = 20, 21, 24, 26
# family, type, index, flags, which flags change
_LINK = struct.Struct("=BxHiII")
_IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_GROUP, _IFLA_NET_NS_FD = 3, 10, 18, 27, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFF_UP = 1
# family, prefix length, flags, scope, index
_ADDRESS = struct.Struct("=BBBBi")
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
# Duplicate address detection makes an address unusable for its first second.
_IFA_F_NODAD = 0x02
# family, lengths of destination and source, tos, table, protocol, scope, type, flags
_ROUTE = struct.Struct("=BBBBBBBBI")
_RTA_DST, _RTA_OIF, _RTA_GATEWAY = 1, 4, 5
_TABLE_MAIN, _PROTOCOL_STATIC, _TYPE_UNICAST, _TYPE_LOCAL = 254, 4, 1, 2
_SCOPE_UNIVERSE, _SCOPE_LINK = 0, 253
_U32 = struct.Struct("=I")

_NEW = NLM_F_CREATE | NLM_F_EXCL
_MAX_POLLS = 5000


class Links:
    """Requests to a namespace. Each raises `NetlinkError`."""

    def __init__(self, netns: Netns | None = None) -> None:
        """netns: this process's if None."""
        self._netlink = netns.run_inside(RequestSocket) if netns else RequestSocket()

    def close(self) -> None:
        self._netlink.close()

    def add_pair(self, name: str, group: int, peer: str, netns: Netns) -> int:
        """A veth pair whose other end, `peer`, is in another namespace; its index here."""
        descriptor = os.open(netns.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            other = _LINK.pack(0, 0, 0, 0, 0) + _name(peer)
            other += attribute(_IFLA_NET_NS_FD, _U32.pack(descriptor))
            return self._add(name, group, "veth", attribute(_VETH_INFO_PEER, other))
        finally:
            os.close(descriptor)

    def add_bridge(self, name: str, group: int) -> int:
        """Its index."""
        return self._add(name, group, "bridge")

    def _add(self, name: str, group: int, kind: str, data: bytes = b"") -> int:
        info = attribute(_IFLA_INFO_KIND, kind.encode())
        if data:
            info += attribute(_IFLA_INFO_DATA, data)
        body = _LINK.pack(0, 0, 0, 0, 0) + _name(name) + attribute(_IFLA_GROUP, _U32.pack(group))
        self._netlink.change(_RTM_NEWLINK, _NEW, body + attribute(_IFLA_LINKINFO, info))
        return socket.if_nametoindex(name)

    def set_up(self, ifindex: int, *, bridge: int | None = None) -> None:
        """bridge: the interface becomes a port of it."""
        body = _LINK.pack(0, 0, ifindex, _IFF_UP, _IFF_UP)
        if bridge is not None:
            body += attribute(_IFLA_MASTER, _U32.pack(bridge))
        self._netlink.change(_RTM_NEWLINK, 0, body)

    def read(self, ifindex: int) -> None:
        """A request for the interface, for its effect in the kernel."""
        self._netlink.change(_RTM_GETLINK, 0, _LINK.pack(0, 0, ifindex, 0, 0))

    def delete(self, *, name: str | None = None, group: int | None = None) -> None:
        """The interface with this name, or those of the group: none is no error."""
        which = _name(name) if name else attribute(_IFLA_GROUP, _U32.pack(group or 0))
        try:
            self._netlink.change(_RTM_DELLINK, 0, _LINK.pack(0, 0, 0, 0, 0) + which)
        except NetlinkError as error:
            if error.errno != errno.ENODEV:
                raise

    def add_address(
        self, ifindex: int, address: IPAddress, prefix_length: int | None = None
    ) -> None:
        """Returns when the namespace accepts packets to it."""
        self._netlink.change(_RTM_NEWADDR, _NEW, _address(ifindex, address, prefix_length))
        if address.version == 4:
            return
        for _ in range(_MAX_POLLS):
            if self._is_local(address):
                return
            time.sleep(network_setup.LOCAL_POLL_SECONDS)
        raise TimeoutError(f"{address} was added, but is not a local address yet")

    def delete_address(self, ifindex: int, address: IPAddress) -> None:
        self._netlink.change(_RTM_DELADDR, 0, _address(ifindex, address))

    def add_host_route(self, address: IPAddress, ifindex: int) -> None:
        """To an address on the link."""
        self._add_route(
            *(address.version, address.max_prefixlen, _SCOPE_LINK),
            attribute(_RTA_DST, address.packed) + attribute(_RTA_OIF, _U32.pack(ifindex)),
        )

    def add_default_route(self, gateway: IPAddress, ifindex: int) -> None:
        self._add_route(
            *(gateway.version, 0, _SCOPE_UNIVERSE),
            attribute(_RTA_GATEWAY, gateway.packed) + attribute(_RTA_OIF, _U32.pack(ifindex)),
        )

    def _add_route(self, version: int, length: int, scope: int, attributes: bytes) -> None:
        header = _ROUTE.pack(
            *(family_of(version), length, 0, 0),
            *(_TABLE_MAIN, _PROTOCOL_STATIC, scope, _TYPE_UNICAST, 0),
        )
        self._netlink.change(_RTM_NEWROUTE, _NEW, header + attributes)

    def _is_local(self, address: IPAddress) -> bool:
        """Whether the route to it is one to the namespace itself; there may be none yet."""
        header = _ROUTE.pack(family_of(address.version), address.max_prefixlen, *[0] * 7)
        try:
            found = self._netlink.change(
                _RTM_GETROUTE, 0, header + attribute(_RTA_DST, address.packed)
            )
        except NetlinkError:
            return False
        return any(_type(route) == _TYPE_LOCAL for route in found)


def _name(name: str) -> bytes:
    return attribute(_IFLA_IFNAME, name.encode() + b"\0")


def _address(ifindex: int, address: IPAddress, prefix_length: int | None = None) -> bytes:
    length = prefix_length or address.max_prefixlen
    flags = _IFA_F_NODAD if address.version == 6 else 0
    body = _ADDRESS.pack(family_of(address.version), length, flags, 0, ifindex)
    body += attribute(_IFA_ADDRESS, address.packed)
    # Of IPv4 it is the address, and the other one that of a peer.
    return body + (attribute(_IFA_LOCAL, address.packed) if address.version == 4 else b"")


def _type(route: bytes) -> int:
    found: int = _ROUTE.unpack_from(route, HEADER_BYTES)[7]
    return found
