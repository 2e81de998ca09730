"""The address plan of strict mode: which of the node's addresses are the relay's.

Each range is cut in eight, one share for each relay that may live at once: an old one carries what
it began while a new one serves. What overlaps with what the node already routes is refused.
"""

import dataclasses
import ipaddress
from collections.abc import Iterable, Sequence

from bpf.abi import IPAddress, IPNetwork

SLOTS = 8
_SLOT_BITS = 3
_NODE_HOST, _INSIDE_HOST = 1, 2

# Eight shares of 256 addresses, and for IPv6 what is usual for one link; the shortest are there to
# catch a slip of the pen.
_PREFIX_LENGTHS = {4: (8, 21), 6: (16, 64)}
_DEFAULTS = {4: "169.254.64.0/18", 6: "fd70:6f64:6761:7465::/64"}

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


@dataclasses.dataclass(frozen=True, slots=True)
class RelayRanges:
    """What is the relay's, and nobody else's, on this node."""

    ipv4: ipaddress.IPv4Network
    ipv6: ipaddress.IPv6Network

    @property
    def networks(self) -> tuple[IPNetwork, IPNetwork]:
        return self.ipv4, self.ipv6

    def shares(self, slot: int) -> tuple[Share, Share]:
        """IPv4 and IPv6, for the relay in this slot (0 to 7)."""
        first, second = (_cut(network, slot) for network in self.networks)
        return Share(first), Share(second)


DEFAULT = RelayRanges(ipaddress.IPv4Network(_DEFAULTS[4]), ipaddress.IPv6Network(_DEFAULTS[6]))


def parse_range4(text: str) -> ipaddress.IPv4Network:
    """Raises `ValueError` with one sentence."""
    return ipaddress.IPv4Network(_parse(text, 4))


def parse_range6(text: str) -> ipaddress.IPv6Network:
    """Raises `ValueError` with one sentence."""
    return ipaddress.IPv6Network(_parse(text, 6))


def _parse(text: str, version: int) -> IPNetwork:
    shortest, longest = _PREFIX_LENGTHS[version]
    hint = (
        f"give an IPv{version} network of /{shortest} to /{longest}, such as {_DEFAULTS[version]}"
    )
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network ({error}); {hint}") from error
    if network.version != version or not shortest <= network.prefixlen <= longest:
        raise ValueError(f"{text} does not do for the relay; {hint}")
    if network.is_multicast or network.is_loopback:
        raise ValueError(f"{text} cannot be routed to the relay; {hint}")
    return network


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
