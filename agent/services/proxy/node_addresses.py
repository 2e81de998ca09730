"""The node's own addresses, for node ports."""

import contextlib
import dataclasses
import ipaddress
from collections.abc import Iterable

import pyroute2
from pyroute2.netlink.exceptions import NetlinkError

from bpf.abi import IPAddress, IPNetwork

PRIMARY = "primary"

_RT_SCOPE_UNIVERSE = 0
# Addresses of documentation (RFC 5737, RFC 3849): only the default route leads there.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


@dataclasses.dataclass(frozen=True, slots=True)
class NodeAddressSelection:
    """Which of the node's addresses have its node ports, as kube-proxy's --nodeport-addresses."""

    networks: tuple[IPNetwork, ...] = ()
    """A family without a network has all its addresses."""
    is_primary: bool = False
    """Only the source address of each family's default route."""

    @property
    def is_all(self) -> bool:
        """Whether every address is selected, also later ones."""
        return not self.is_primary and all(network.prefixlen == 0 for network in self.networks)

    def read(self) -> tuple[IPAddress, ...]:
        """Those of this network namespace, sorted. Blocks for some milliseconds."""
        return self.selected(_read_primary() if self.is_primary else _read_all())

    def selected(self, addresses: Iterable[IPAddress]) -> tuple[IPAddress, ...]:
        """The selected ones, sorted; not loopback, link-local or multicast ones.

        Only kube-proxy's oldest mode serves node ports on loopback addresses.
        """
        found = {
            address
            for address in addresses
            if not (address.is_loopback or address.is_link_local or address.is_multicast)
            and self._is_selected(address)
        }
        return tuple(sorted(found, key=lambda it: (it.version, it.packed)))

    def _is_selected(self, address: IPAddress) -> bool:
        own = [network for network in self.networks if network.version == address.version]
        return not own or any(address in network for network in own)


def parse(texts: Iterable[str]) -> NodeAddressSelection:
    """Networks, or `primary` alone; a text may have several, with commas. Raises `ValueError`."""
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    if PRIMARY in words:
        if set(words) != {PRIMARY}:
            raise ValueError(f"{PRIMARY!r} cannot be combined with networks")
        return NodeAddressSelection(is_primary=True)
    return NodeAddressSelection(tuple(map(ipaddress.ip_network, words)))


def _read_all() -> set[IPAddress]:
    with pyroute2.IPRoute() as netlink:
        messages = netlink.get_addr(scope=_RT_SCOPE_UNIVERSE)
        texts = {message.get("IFA_LOCAL") or message.get("IFA_ADDRESS") for message in messages}
    return {ipaddress.ip_address(text) for text in texts if text}


def _read_primary() -> set[IPAddress]:
    found = set()
    with pyroute2.IPRoute() as netlink:
        for destination in _ELSEWHERE:
            with contextlib.suppress(NetlinkError):  # there is no default route
                (route,) = netlink.route("get", dst=destination)
                if text := route.get("RTA_PREFSRC"):
                    found.add(ipaddress.ip_address(text))
    return found
