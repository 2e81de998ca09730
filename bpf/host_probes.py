"""Addresses and ports that the kubelet may not connect to: the `host` of probes and hooks.

The hook at connect rejects them to the kubelet's cgroup while the agent's heartbeat is fresh
(`src/hooks.c`), and counts.
"""

import struct
from collections.abc import Set

from bpf import abi, errors, loader, map_specs

Target = tuple[abi.IPAddress, int]
"""Address and TCP port."""

_PORT = struct.Struct("=HH")
_COUNT = struct.Struct("=Q")


class HostProbes:
    """The map of them. One writer: the agent."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._map = loaded.map(map_specs.DENIED_HOST_PROBES)

    def replace(self, targets: Set[Target]) -> int:
        """Deny exactly these; existing ones keep their count. Returns how many had no room."""
        desired = {_key(target) for target in targets}
        present = {key for key, _ in self._map.items()}
        for key in present - desired:
            self._map.delete(key)
        left_out = 0
        for key in sorted(desired - present):
            try:
                self._map.set(key, _COUNT.pack(0))
            except errors.BpfError:
                left_out += 1
        return left_out

    def counts(self) -> dict[Target, int]:
        """Rejected connects, by target."""
        return {
            (abi.unpack_address(key[:16]), _PORT.unpack(key[16:])[0]): _COUNT.unpack(value)[0]
            for key, value in self._map.items()
        }


def _key(target: Target) -> bytes:
    address, port = target
    return abi.pack_address(address) + _PORT.pack(port, 0)
