"""Tunnels of the node, found by its interfaces: a process could encapsulate packets for them."""

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
class TunnelPorts:
    """udp_ports: on which the kernel decapsulates; has_any: whether a tunnel exists at all."""

    udp_ports: frozenset[int]
    has_any: bool


_NONE = TunnelPorts(frozenset(), has_any=False)


def find_tunnels(links: Iterable[Link], listeners: TunnelPorts = _NONE) -> TunnelPorts:
    """Tunnels of interfaces that are up. listeners: those without an interface."""
    up = [link for link in links if link.is_up]
    ports = listeners.udp_ports.union(port for link in up for port in link.udp_ports)
    has_any = bool(ports) or listeners.has_any or any(link.kind in _IP_TUNNELS for link in up)
    return TunnelPorts(ports, has_any)
