"""The map of the host processes' raw sockets: hooks keep it, this adds what they have missed."""

import struct
from collections.abc import Iterable

from bpf import abi, loader

_VALUE = struct.Struct("=Q")


class RawSockets:
    """The raw sockets that the gate does not take for the kernel's, by cookie (SO_COOKIE)."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._map = loaded.map(abi.RAW_SOCKETS)

    def add(self, cookies: Iterable[int]) -> None:
        """Record sockets from before the hooks; their cgroups are unknown, 0. Raises `BpfError`."""
        for cookie in cookies:
            key = _VALUE.pack(cookie)
            if self._map.get(key) is None:
                self._map.set(key, _VALUE.pack(0))

    def cookies(self) -> set[int]:
        return {_VALUE.unpack(key)[0] for key, _ in self._map.items()}
