"""The node's own tunnels, as its interfaces tell: what a process could wrap a packet in."""

import dataclasses
from collections.abc import Iterable
from typing import Any

_IFF_UP = 1

# Attributes of `IFLA_INFO_DATA` that name the UDP port a device listens on
# (include/uapi/linux/if_link.h); of IP tunnels, the one by which FOU or GUE wraps them.
_PORTS = (
    *("IFLA_VXLAN_PORT", "IFLA_GENEVE_PORT"),
    *("IFLA_IPIP_ENCAP_DPORT", "IFLA_IP6TNL_ENCAP_DPORT"),
    *("IFLA_GRE_ENCAP_DPORT", "IFLA_IP6GRE_ENCAP_DPORT"),
)
_IP_TUNNELS = frozenset(
    {
        *("ipip", "sit", "ip6tnl", "vti", "vti6"),
        *("gre", "gretap", "ip6gre", "ip6gretap", "erspan", "ip6erspan"),
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Tunnels:
    """udp_ports: that the kernel unwraps packets from; any: whether there is a tunnel at all."""

    udp_ports: frozenset[int]
    any: bool


def find_tunnels(links: Iterable[Any]) -> Tunnels:
    """Of interfaces that are up; links: as pyroute2's `get_links` gives them."""
    ports: set[int] = set()
    has_ip_tunnel = False
    for link in links:
        if not link["flags"] & _IFF_UP:
            continue
        info = link.get_attr("IFLA_LINKINFO")
        if info is None:
            continue
        if info.get_attr("IFLA_INFO_KIND") in _IP_TUNNELS:
            has_ip_tunnel = True
        data = info.get_attr("IFLA_INFO_DATA")
        if data is None or not hasattr(data, "get_attr"):
            continue
        ports |= {port for name in _PORTS if (port := data.get_attr(name))}
    return Tunnels(frozenset(ports), bool(ports) or has_ip_tunnel)
