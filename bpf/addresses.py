"""The address map: the gated interface of each pod address, for hooks and bridges."""

import collections
import errno
import struct

from bpf import abi, errors, loader, map_specs

_IFINDEX = struct.Struct("=I")
# Two pods may have one address, in separate networks; then only the gates distinguish them.
_SEVERAL = 0


class Addresses:
    """The map from address to ifindex. One writer: `Gates`."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._map = loaded.map(map_specs.ADDRESSES)
        self._owners: dict[abi.IPAddress, dict[int, str]] = collections.defaultdict(dict)
        self._of: dict[int, set[abi.IPAddress]] = {}

    def set(self, ifindex: int, addresses: tuple[abi.IPAddress, ...], pod: str = "") -> None:
        """Replace the addresses behind an interface of a pod ("": one that has no other).

        Addresses beyond the map's capacity are left out: their gate still filters packets to them.
        """
        before = self._of.get(ifindex, set())
        after = set(addresses)
        for address in after:
            self._owners[address][ifindex] = pod
        for address in before - after:
            self._owners[address].pop(ifindex, None)
        self._of[ifindex] = after
        for address in before | after:
            self._write(address)

    def forget(self, ifindex: int) -> None:
        """Remove all addresses of an interface."""
        self.set(ifindex, ())
        self._of.pop(ifindex)

    def retain(self) -> None:
        """Remove entries that a previous run left for deleted interfaces."""
        current = {abi.pack_address(address) for address in self._owners}
        for key, _ in list(self._map.items()):
            if key not in current:
                self._map.delete(key)

    def _write(self, address: abi.IPAddress) -> None:
        owners = self._owners[address]
        key = abi.pack_address(address)
        if not owners:
            del self._owners[address]
            self._map.delete(key)
            return
        pods = set(owners.values())
        # The gates of one pod have the same rules, so that of any of its interfaces decides.
        is_one_pods = len(owners) == 1 or (len(pods) == 1 and pods != {""})
        value = _IFINDEX.pack(min(owners) if is_one_pods else _SEVERAL)
        if self._map.get(key) != value:
            try:
                self._map.set(key, value)
            except errors.BpfError as error:
                if error.errno != errno.E2BIG:
                    raise
