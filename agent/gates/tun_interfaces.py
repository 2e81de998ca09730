"""tun and tap interfaces: whether packets from one count as the host's.

A process of the node writes what comes from a tun interface. It may be the process's own; but
flannel's udp backend and userspace VPNs carry other nodes' pods that way, and routes show it: the
node sends to networks behind the interface.
"""

import fnmatch
from collections.abc import Collection, Iterable

from agent.linux.node_routes import DeviceRoute
from agent.linux.rtnetlink import Link
from bpf.abi import IPAddress

# VPNs write the default route as two or four more specific ones (0.0.0.0/1, 2000::/3).
_DEFAULT_LENGTH = 3


def find_tuns(links: Iterable[Link]) -> list[Link]:
    """All but ports of bridges, which are those of virtual machines."""
    return [link for link in links if link.kind == "tun" and link.master is None]


def is_named(link: Link, patterns: Collection[str]) -> bool:
    """Whether the operator named it (`--forwarding-interfaces`)."""
    return any(fnmatch.fnmatchcase(link.name, pattern) for pattern in patterns)


def forwarding_routes(
    routes: Iterable[DeviceRoute], pods: Collection[IPAddress] = ()
) -> list[DeviceRoute]:
    """The routes that show that an interface carries traffic of others.

    Routes to networks behind it, or to a network of which this node's pods are a part: flannel's
    address on the interface is of such a network. Not default routes, nor those to neighbours on
    the link.
    """
    return [
        route
        for route in routes
        if route.network.prefixlen > _DEFAULT_LENGTH
        and not route.network.is_link_local
        and not route.network.is_multicast
        and (not route.is_on_link or any(pod in route.network for pod in pods))
    ]
