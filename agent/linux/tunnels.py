"""The node's own tunnels, as its interfaces tell: what a process could wrap a packet in."""

import dataclasses
from collections.abc import Iterable

from agent.linux.rtnetlink import Link

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


def find_tunnels(links: Iterable[Link]) -> Tunnels:
    """Of interfaces that are up."""
    up = [link for link in links if link.is_up]
    ports = frozenset(port for link in up for port in link.udp_ports)
    return Tunnels(ports, bool(ports) or any(link.kind in _IP_TUNNELS for link in up))
