"""Pinned maps in memory, in place of the kernel's."""

import errno
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import cast

from bpf import errors, loader, map_specs


class Map:
    """One map. fd: of what a program maps into memory; room: for how many entries."""

    def __init__(self, entries: Mapping[bytes, bytes], fd: int = -1, room: int = 1000) -> None:
        self.entries = dict(entries)
        self.fd = fd
        self.room = room
        self.writes = 0

    def get(self, key: bytes) -> bytes | None:
        return self.entries.get(key)

    def set(self, key: bytes, value: bytes) -> None:
        if key not in self.entries and len(self.entries) >= self.room:
            raise errors.BpfError(errno.E2BIG, "the map is full")
        self.writes += 1
        self.entries[key] = value

    def delete(self, key: bytes) -> bool:
        return self.entries.pop(key, None) is not None

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(list(self.entries.items()))

    items_by_key = items


def loaded(maps: Mapping[map_specs.MapSpec, Map]) -> loader.Loaded:
    """With these maps alone."""
    return cast(loader.Loaded, SimpleNamespace(map=maps.__getitem__))
