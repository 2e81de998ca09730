"""The map of the host processes' raw sockets that are older than the hooks."""

import struct
from collections.abc import Iterable

from bpf import loader, map_specs

_COOKIE, _VALUE = struct.Struct("=Q"), struct.Struct("=I")


class OldRawSockets:
    """Raw sockets that the gate does not take for the kernel's, by cookie (SO_COOKIE)."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._map = loaded.map(map_specs.OLD_RAW_SOCKETS)

    def add(self, cookies: Iterable[int]) -> None:
        """Raises `BpfError`."""
        for cookie in cookies:
            self._map.set(_COOKIE.pack(cookie), _VALUE.pack(1))

    def cookies(self) -> set[int]:
        return {_COOKIE.unpack(key)[0] for key, _ in self._map.items()}
