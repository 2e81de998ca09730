"""Address plan of mode strict: the ranges of the relays, and their shares.

Each range is divided into eight shares, one for each relay that may run at once: an old relay
drains its connections while a new one serves. A range that overlaps a route of the node is
rejected.
"""

import dataclasses
import ipaddress
from collections.abc import Iterable, Sequence

from agent.relay import interfaces
from agent.settings import RelayRanges
from bpf.abi import IPAddress, IPNetwork

SLOTS = interfaces.SLOTS
_SLOT_BITS = 3
_NODE_HOST, _INSIDE_HOST = 1, 2

# VPNs install the default route in two halves: neither is a conflict.
_HALF_DEFAULT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """One route or address of the node."""

    network: IPNetwork
    text: str
    """As in `ip route`: "10.0.0.0/8 dev eth0"."""


@dataclasses.dataclass(frozen=True, slots=True)
class RangeShare:
    """One relay's part of a range."""

    subnet: IPNetwork

    @property
    def node(self) -> IPAddress:
        """Address of the pair's end on the host."""
        return self.subnet[_NODE_HOST]

    @property
    def way(self) -> IPAddress:
        """Where no pod is: the relay rejects each SYN, which shows that it arrives."""
        return self.subnet[interfaces.WAY_HOST]

    @property
    def inside(self) -> IPAddress:
        """Address of the relay's end, the gateway to the rest of the share."""
        return self.subnet[_INSIDE_HOST]


def shares(ranges: RelayRanges, slot: int) -> tuple[RangeShare, RangeShare]:
    """IPv4 and IPv6, for the relay in this slot (0 to 7)."""
    first, second = (_share(network, slot) for network in ranges.networks)
    return RangeShare(first), RangeShare(second)


def find_overlap(ranges: RelayRanges, routes: Iterable[Route]) -> str | None:
    """One sentence about a route of the node that overlaps a range, or None."""
    for route in routes:
        if route.network.prefixlen <= _HALF_DEFAULT:
            continue
        for network in ranges.networks:
            if network.version == route.network.version and network.overlaps(route.network):
                return (
                    f"the relay's range {network} overlaps the node's route {route.text}; set "
                    f"another with --relay-range{network.version}."
                )
    return None


def free_slot(taken: Sequence[int]) -> int | None:
    """The lowest slot without a relay."""
    return next((slot for slot in range(SLOTS) if slot not in taken), None)


def _share(network: IPNetwork, slot: int) -> IPNetwork:
    bits = network.max_prefixlen - network.prefixlen - _SLOT_BITS
    first = network[slot << bits]
    return ipaddress.ip_network(f"{first}/{network.prefixlen + _SLOT_BITS}")
