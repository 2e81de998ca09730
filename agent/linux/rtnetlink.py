"""The interfaces of a network namespace, all in one dump, or one.

They are read whenever one appears, disappears or changes, and a node has some for each pod.
pyroute2 takes 0.3 ms to decode a link's hundred attributes; here only those are decoded that
podgate uses.
"""

import dataclasses
import struct
from collections.abc import Mapping

from agent.linux import netlink
from agent.linux.procfs import raise_own
from bpf.netlink import HEADER_BYTES, attribute, attributes, text
from probes.netns import Netns

_IFINFO = struct.Struct("=BxHiII")  # family, type, index, flags, change
_U32, _S32 = struct.Struct("=I"), struct.Struct("=i")
_ATTRIBUTES = HEADER_BYTES + _IFINFO.size

_RTM_GETLINK = 18  # include/uapi/linux/rtnetlink.h
# include/uapi/linux/if_link.h
_IFLA_IFNAME, _IFLA_LINK, _IFLA_MASTER = 3, 5, 10
_IFLA_LINKINFO, _IFLA_EXT_MASK, _IFLA_LINK_NETNSID = 18, 29, 37
_IFLA_INFO_KIND, _IFLA_INFO_DATA = 1, 2
_SKIP_STATS = 1 << 3  # RTEXT_FILTER_SKIP_STATS

_IFF_UP, _IFF_LOOPBACK = 1, 8
_ARPHRD_ETHER = 1
_IFLA_TUN_TYPE, _TAP = 3, b"\x02"  # IFF_TAP of linux/if_tun.h

# Of kinds that unwrap UDP, the attribute of `IFLA_INFO_DATA` with the port, in network order; of IP
# tunnels, the port by which FOU or GUE wraps them (include/uapi/linux/if_link.h, if_tunnel.h).
_IFLA_IPTUN_ENCAP_DPORT, _IFLA_GRE_ENCAP_DPORT = 18, 17
_PORT_ATTRIBUTES = {
    **{"vxlan": 15, "geneve": 5, "bareudp": 1},
    **dict.fromkeys(("ipip", "sit", "ip6tnl"), _IFLA_IPTUN_ENCAP_DPORT),
    **dict.fromkeys(("gre", "gretap", "erspan"), _IFLA_GRE_ENCAP_DPORT),
    **dict.fromkeys(("ip6gre", "ip6gretap", "ip6erspan"), _IFLA_GRE_ENCAP_DPORT),
}
# A GTP device has no port of its own but sockets: GTPv1-U's, and version 0's (3GPP TS 29.281).
_GTP_PORTS = frozenset({2152, 3386})


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
    messages = await netlink.dump(_RTM_GETLINK, _request(0), netns=netns)
    return _own_links.of(messages) if netns is None else [parse(message) for message in messages]


async def find(ifindex: int) -> Link | None:
    """One link of this process's namespace; None if it has none of this number. Raises `OSError`
    if that is unknown: this process has no descriptor or memory left."""
    return await netlink.within(lambda host: found_in(host, ifindex))


def read_in(netns: netlink.Exchange) -> list[Link]:
    """As `read`, of the exchange's namespace."""
    return [parse(message) for message in netns.dump(_RTM_GETLINK, _request(0))]


def found_in(netns: netlink.Exchange, ifindex: int) -> Link | None:
    """As `find`, of the exchange's namespace."""
    try:
        (message,) = netns.request(_RTM_GETLINK, _request(ifindex))
    except OSError as error:
        raise_own(error)
        return None
    return parse(message)


def _request(ifindex: int) -> bytes:
    mask = attribute(_IFLA_EXT_MASK, _U32.pack(_SKIP_STATS))
    return _IFINFO.pack(0, 0, ifindex, 0, 0) + mask


def parse(message: bytes) -> Link:
    """A message of a link, with its header."""
    _, type_, index, flags, _ = _IFINFO.unpack_from(message, HEADER_BYTES)
    values = attributes(message, _ATTRIBUTES)
    info = attributes(values.get(_IFLA_LINKINFO, b""))
    kind = text(info[_IFLA_INFO_KIND]) if _IFLA_INFO_KIND in info else None
    data = attributes(info.get(_IFLA_INFO_DATA, b""))
    return Link(
        index=index,
        name=text(values.get(_IFLA_IFNAME, b"")),
        flags=flags,
        kind=kind,
        peer=_number(values.get(_IFLA_LINK)),
        peer_nsid=_number(values.get(_IFLA_LINK_NETNSID)),
        master=_number(values.get(_IFLA_MASTER)),
        udp_ports=_udp_ports(kind, data),
        is_tap=kind == "macvtap" or (kind == "tun" and data.get(_IFLA_TUN_TYPE) == _TAP),
        is_ethernet=type_ == _ARPHRD_ETHER,
    )


_own_links = netlink.ParsedDump(parse)
"""Those of this process's namespace."""


def _udp_ports(kind: str | None, data: Mapping[int, bytes]) -> frozenset[int]:
    if kind == "gtp":
        return _GTP_PORTS
    if kind not in _PORT_ATTRIBUTES:
        return frozenset()
    port = int.from_bytes(data.get(_PORT_ATTRIBUTES[kind], b""), "big")
    return frozenset({port} if port else ())


def _number(value: bytes | None) -> int | None:
    return _S32.unpack_from(value)[0] if value and len(value) >= _S32.size else None
