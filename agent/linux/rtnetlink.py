"""The interfaces of a network namespace, all in one dump, or one.

They are read whenever one appears, disappears or changes, and a node has some for each pod.
pyroute2 takes 0.3 ms to decode a link's hundred attributes, so of most kinds only the attributes
that podgate uses are decoded here; pyroute2 decodes those of tunnels and tun interfaces.
"""

import dataclasses
import struct
from collections.abc import Callable, Iterator
from typing import Any

from pyroute2.netlink.rtnl import RTM_GETLINK
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.linux import netlink
from bpf.netlink import HEADER_BYTES, attribute
from probes.netns import Netns

_IFINFO = struct.Struct("=BxHiII")  # family, type, index, flags, change
_ATTRIBUTE = struct.Struct("=HH")
_U32, _S32 = struct.Struct("=I"), struct.Struct("=i")
_BODY = HEADER_BYTES
_ATTRIBUTES = _BODY + _IFINFO.size
_TYPE_MASK = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER

# include/uapi/linux/if_link.h
_IFLA_IFNAME, _IFLA_LINK, _IFLA_MASTER = 3, 5, 10
_IFLA_LINKINFO, _IFLA_EXT_MASK, _IFLA_LINK_NETNSID = 18, 29, 37
_IFLA_INFO_KIND = 1
_SKIP_STATS = 1 << 3  # RTEXT_FILTER_SKIP_STATS

_IFF_UP, _IFF_LOOPBACK = 1, 8
_ARPHRD_ETHER = 1
# Kinds of which podgate uses no attribute of `IFLA_INFO_DATA`; None: physical, or the loopback.
_PLAIN_KINDS = frozenset({None, "bridge", "dummy", "ifb", "ipvlan", "macvlan", "veth", "vlan"})
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


async def read(netns: Netns | None = None) -> list[Link]:
    """All links of a namespace, this process's if None. Raises `OSError` and `NetnsGoneError`."""
    messages = await netlink.dump(RTM_GETLINK, _request(0), netns=netns)
    return [_parse(message) for message in messages]


async def find(ifindex: int) -> Link | None:
    """One link of this process's namespace; None if it has none of this number."""
    try:
        (message,) = await netlink.request(RTM_GETLINK, _request(ifindex))
    except OSError:
        return None
    return _parse(message)


def _request(ifindex: int) -> bytes:
    mask = attribute(_IFLA_EXT_MASK, _U32.pack(_SKIP_STATS))
    return _IFINFO.pack(0, 0, ifindex, 0, 0) + mask


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


def _parse(data: bytes) -> Link:
    _, type_, index, flags, _ = _IFINFO.unpack_from(data, _BODY)
    name, kind = "", None
    peer = peer_nsid = master = None
    at = _ATTRIBUTES
    while at < len(data):
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
    if kind in _PLAIN_KINDS:
        is_ethernet = type_ == _ARPHRD_ETHER
        return Link(index, name, flags, kind, peer, peer_nsid, master, is_ethernet=is_ethernet)
    message = ifinfmsg(data)
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
