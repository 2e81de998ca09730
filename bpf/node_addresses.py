"""The map of the host's addresses, by which gates and hooks know in whose name a socket speaks."""

import ipaddress
import struct
from collections.abc import Iterable

from bpf import abi, loader, map_specs
from bpf.abi import IPAddress, IPNetwork

_IPV4_BITS = 96
"""Before those of an IPv4 address, as it is mapped."""

_PREFIX, _PRESENT = struct.Struct("=I"), struct.pack("=I", 1)


class NodeAddressMap:
    """Addresses, and ranges of them. One writer: the agent."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._map = loaded.map(map_specs.NODE_ADDRESSES)

    def has(self, address: IPAddress) -> bool:
        """Whether it is one of them, or in one of the ranges."""
        return self._map.get(_pack(ipaddress.ip_network(address))) is not None

    def set(self, networks: Iterable[IPNetwork]) -> None:
        """These and no others. Raises `BpfError` (E2BIG: more than 65,536)."""
        desired = {_pack(network) for network in networks}
        present = {key for key, _ in self._map.items_by_key()}
        for key in desired - present:
            self._map.set(key, _PRESENT)
        for key in present - desired:
            self._map.delete(key)


def _pack(network: IPNetwork) -> bytes:
    bits = network.prefixlen + (_IPV4_BITS if network.version == 4 else 0)
    return _PREFIX.pack(bits) + abi.pack_address(network.network_address)
