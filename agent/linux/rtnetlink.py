"""The interfaces of a network namespace, all in one dump.

They are read whenever one appears, disappears or changes, and a node has some for each pod.
pyroute2 takes 0.3 ms to decode a link's hundred attributes, so of veths, which are many, only the
attributes that podgate uses are decoded here; pyroute2 decodes the others.
"""

import asyncio
import dataclasses
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pyroute2
from pyroute2.netlink import NLM_F_DUMP, NLM_F_REQUEST
from pyroute2.netlink.nlsocket import NetlinkRequest
from pyroute2.netlink.rtnl import RTM_GETLINK, RTM_NEWLINK
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

_NLMSG_HEADER = struct.Struct("=IHHI")
_IFINFO = struct.Struct("=BxHiII")  # family, type, index, flags, change
_ATTRIBUTE = struct.Struct("=HH")
_U32, _S32 = struct.Struct("=I"), struct.Struct("=i")
_BODY = 16  # after struct nlmsghdr
_ATTRIBUTES = 32  # after struct ifinfomsg as well
_TYPE_MASK = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER

# include/uapi/linux/if_link.h
_IFLA_IFNAME, _IFLA_LINK, _IFLA_MASTER = 3, 5, 10
_IFLA_LINKINFO, _IFLA_LINK_NETNSID = 18, 37
_IFLA_INFO_KIND = 1
_SKIP_STATS = 1 << 3  # RTEXT_FILTER_SKIP_STATS

_IFF_UP, _IFF_LOOPBACK = 1, 8
_ARPHRD_ETHER = 1
_TUN_TYPE_TAP = 2  # IFLA_TUN_TYPE: IFF_TAP of linux/if_tun.h

# Attributes of `IFLA_INFO_DATA` that name the UDP port a device listens on; of IP tunnels, the one
# by which FOU or GUE wraps them.
_PORTS = (
    *("IFLA_VXLAN_PORT", "IFLA_GENEVE_PORT"),
    *("IFLA_IPIP_ENCAP_DPORT", "IFLA_IP6TNL_ENCAP_DPORT"),
    *("IFLA_GRE_ENCAP_DPORT", "IFLA_IP6GRE_ENCAP_DPORT"),
)
# A GTP device has no port of its own but sockets: GTPv1-U's, and version 0's (3GPP TS 29.281).
_GTP_PORTS = frozenset({2152, 3386})
_IFLA_BAREUDP_PORT = 1  # include/uapi/linux/if_link.h; in network order


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One interface. kind: None for a physical one, or the loopback."""

    index: int
    name: str
    flags: int = _IFF_UP
    kind: str | None = None
    peer: int | None = None
    """IFLA_LINK: the other end of a veth, in its own namespace's numbers."""
    peer_nsid: int | None = None
    """The number of that namespace; None where it is this one."""
    master: int | None = None
    udp_ports: frozenset[int] = frozenset()
    """From which a tunnel unwraps packets."""
    is_tap: bool = False
    is_ethernet: bool = True
    """Whether its frames have an Ethernet header."""

    @property
    def is_up(self) -> bool:
        return bool(self.flags & _IFF_UP)

    @property
    def is_loopback(self) -> bool:
        return bool(self.flags & _IFF_LOOPBACK)


class SharedIPRoute(pyroute2.AsyncIPRoute):  # type: ignore[misc]
    """For requests of several tasks at once.

    pyroute2 makes the transport at the first request. Each of several first requests would make
    one for the same descriptor, which asyncio rejects with RuntimeError since Python 3.13.
    """

    def __init__(self, **options: Any) -> None:
        self._connecting = asyncio.Lock()
        super().__init__(**options)

    async def setup_endpoint(self) -> None:
        async with self._connecting:
            await super().setup_endpoint()


async def read(netlink: pyroute2.AsyncIPRoute) -> list[Link]:
    """All links in the namespace of `netlink`. Raises `pyroute2.NetlinkError` and `OSError`."""
    message = ifinfmsg()
    message["attrs"] = [("IFLA_EXT_MASK", _SKIP_STATS)]
    found: list[Link] = []

    def parse(data: bytes, offset: int, length: int) -> Any:
        _, kind, flags, number = _NLMSG_HEADER.unpack_from(data, offset)
        if kind != RTM_NEWLINK:
            return netlink.marshal.parse_one_message(kind, flags, number, data, offset, length)
        found.append(_parse(data, offset, length))
        # A response without any message would end the dump.
        return {"header": {"type": kind, "flags": flags, "error": None}}

    request = NetlinkRequest(
        netlink,
        message,
        msg_type=RTM_GETLINK,
        msg_flags=NLM_F_DUMP | NLM_F_REQUEST,
        parser=parse,
    )
    await request.send()
    async for _ in request.response():
        pass
    return found


def of_message(message: Any) -> Link:
    """The same of a link that pyroute2 decoded."""
    info = message.get_attr("IFLA_LINKINFO")
    kind = data = None
    if info is not None:
        kind, data = info.get_attr("IFLA_INFO_KIND"), info.get_attr("IFLA_INFO_DATA")
    # What pyroute2 does not know it leaves as text.
    get: Callable[[str], Any] = getattr(data, "get_attr", lambda name: None)
    return Link(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME") or "",
        flags=message["flags"],
        kind=kind,
        peer=message.get_attr("IFLA_LINK"),
        peer_nsid=message.get_attr("IFLA_LINK_NETNSID"),
        master=message.get_attr("IFLA_MASTER"),
        udp_ports=_udp_ports(kind, data, get),
        is_tap=kind == "macvtap" or (kind == "tun" and get("IFLA_TUN_TYPE") == _TUN_TYPE_TAP),
        is_ethernet=message["ifi_type"] == _ARPHRD_ETHER,
    )


def _udp_ports(kind: str | None, data: Any, get: Callable[[str], Any]) -> frozenset[int]:
    if kind == "gtp":
        return _GTP_PORTS
    if kind == "bareudp" and isinstance(data, str):
        return frozenset(_bareudp_ports(bytes.fromhex(data.replace(":", ""))))
    return frozenset(port for name in _PORTS if (port := get(name)))


def _bareudp_ports(data: bytes) -> Iterator[int]:
    at = 0
    while at + 4 <= len(data):
        size, attribute = _ATTRIBUTE.unpack_from(data, at)
        if attribute & _TYPE_MASK == _IFLA_BAREUDP_PORT:
            yield int.from_bytes(data[at + 4 : at + size], "big")
        at += max(4, (size + 3) & ~3)


def _parse(data: bytes, offset: int, length: int) -> Link:
    _, type_, index, flags, _ = _IFINFO.unpack_from(data, offset + _BODY)
    name, kind = "", None
    peer = peer_nsid = master = None
    end = offset + length
    at = offset + _ATTRIBUTES
    while at < end:
        size, attribute = _ATTRIBUTE.unpack_from(data, at)
        attribute &= _TYPE_MASK
        if attribute == _IFLA_IFNAME:
            name = _text(data, at, size)
        elif attribute == _IFLA_LINK:
            (peer,) = _U32.unpack_from(data, at + 4)
        elif attribute == _IFLA_MASTER:
            (master,) = _U32.unpack_from(data, at + 4)
        elif attribute == _IFLA_LINK_NETNSID:
            (peer_nsid,) = _S32.unpack_from(data, at + 4)
        elif attribute == _IFLA_LINKINFO:
            kind = _kind(data, at + 4, at + size)
        at += (size + 3) & ~3
    if kind in (None, "veth"):
        is_ethernet = type_ == _ARPHRD_ETHER
        return Link(index, name, flags, kind, peer, peer_nsid, master, is_ethernet=is_ethernet)
    message = ifinfmsg(data, offset=offset)
    message.decode()
    return of_message(message)


def _kind(data: bytes, at: int, end: int) -> str | None:
    while at < end:
        size, attribute = _ATTRIBUTE.unpack_from(data, at)
        if attribute & _TYPE_MASK == _IFLA_INFO_KIND:
            return _text(data, at, size)
        at += (size + 3) & ~3
    return None


def _text(data: bytes, at: int, size: int) -> str:
    """An attribute's, which ends with a zero byte."""
    return data[at + 4 : at + size].rstrip(b"\0").decode(errors="replace")
