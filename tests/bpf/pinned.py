"""Pinned maps in memory, in place of the kernel's."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import cast

from bpf import abi, loader


class Map:
    """One map. fd: of what a program maps into memory."""

    def __init__(self, entries: Mapping[bytes, bytes], fd: int = -1) -> None:
        self.entries = dict(entries)
        self.fd = fd

    def get(self, key: bytes) -> bytes | None:
        return self.entries.get(key)

    def set(self, key: bytes, value: bytes) -> None:
        self.entries[key] = value

    def delete(self, key: bytes) -> bool:
        return self.entries.pop(key, None) is not None

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(list(self.entries.items()))


def loaded(maps: Mapping[abi.MapSpec, Map]) -> loader.Loaded:
    """With these maps alone."""
    return cast(loader.Loaded, SimpleNamespace(map=maps.__getitem__))
