"""The address plan of strict mode: which of the node's addresses are the relay's.

Each range is cut in eight, one share for each relay that may live at once: an old one carries what
it began while a new one serves. What overlaps with what the node already routes is refused.
"""

import dataclasses
import ipaddress
from collections.abc import Iterable, Sequence

from agent.settings import RelayRanges
from bpf.abi import IPAddress, IPNetwork

SLOTS = 8
_SLOT_BITS = 3
_NODE_HOST, _INSIDE_HOST = 1, 2

# A default route in two halves, as VPNs write it, claims no address of its own either.
_HALF = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """One route or address of the node, as far as it matters here."""

    network: IPNetwork
    text: str
    """As a person would look for it: "10.0.0.0/8 dev eth0"."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """One relay's part of a range."""

    subnet: IPNetwork

    @property
    def node(self) -> IPAddress:
        """The node's end of the pair."""
        return self.subnet[_NODE_HOST]

    @property
    def inside(self) -> IPAddress:
        """The relay's end, by which the rest is reached."""
        return self.subnet[_INSIDE_HOST]


def shares(ranges: RelayRanges, slot: int) -> tuple[Share, Share]:
    """IPv4 and IPv6, for the relay in this slot (0 to 7)."""
    first, second = (_cut(network, slot) for network in ranges.networks)
    return Share(first), Share(second)


def find_overlap(ranges: RelayRanges, routes: Iterable[Route]) -> str | None:
    """One sentence about somebody else's route to the relay's range, if there is one."""
    for route in routes:
        if route.network.prefixlen <= _HALF:
            continue
        for network in ranges.networks:
            if network.version == route.network.version and network.overlaps(route.network):
                return (
                    f"the relay's range {network} is taken by the node's route {route.text}; name "
                    f"another with --relay-range{network.version}."
                )
    return None


def free_slot(taken: Sequence[int]) -> int | None:
    """The lowest one that no relay has."""
    return next((slot for slot in range(SLOTS) if slot not in taken), None)


def _cut(network: IPNetwork, slot: int) -> IPNetwork:
    bits = network.max_prefixlen - network.prefixlen - _SLOT_BITS
    first = network[slot << bits]
    return ipaddress.ip_network(f"{first}/{network.prefixlen + _SLOT_BITS}")
