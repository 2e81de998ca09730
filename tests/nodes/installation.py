"""An installation that a worker loads once: each test finds it as it was loaded.

The verifier takes half a second of CPU time for podgate's programs, which is more than an agent and
its test take.
"""

import asyncio
import collections
import contextlib
import mmap
import os
import pathlib
from collections.abc import Iterator

from bpf import errors, loader, maps, pins, syscalls
from bpf.drop_events import DropEventReader

_ARRAYS = (2, 6)  # BPF_MAP_TYPE_ARRAY and BPF_MAP_TYPE_PERCPU_ARRAY of linux/bpf.h
# Memory of this size is used again and again. What is larger is new each time, with a page fault
# for each of its pages, which takes longer than reading the array.
_PART_BYTES = 1 << 16


class Installation:
    """Loaded programs, and maps with what they held then."""

    def __init__(self, bpffs: pathlib.Path) -> None:
        """Loads and pins them. Raises as `loader.load`."""
        self.pins = pins.Pins(bpffs)
        self.loaded = asyncio.run(loader.load(self.pins))
        self._pinned: dict[pathlib.Path, int] = {}
        self._open_pins()
        self._arrays = {
            name: list(_parts(opened))
            for name, opened in self.loaded.open_maps.items()
            if opened.spec.type in _ARRAYS
        }

    def close(self) -> None:
        self.loaded.close()
        for descriptor in self._pinned.values():
            os.close(descriptor)

    def load_moving_copies(self) -> None:
        asyncio.run(loader.load_moving_copies(self.pins, self.loaded))
        self._open_pins()

    def restore(self) -> None:
        """Pin what was loaded, and nothing else. Empty hashes and rings; write what is different in
        arrays."""
        self.pins.remove_everything()
        self.pins.prepare()
        for path, descriptor in self._pinned.items():
            path.parent.mkdir(exist_ok=True)
            syscalls.pin(descriptor, str(path))
        for name, opened in self.loaded.open_maps.items():
            if name in self._arrays:
                _write(opened, self._arrays[name])
            elif opened.spec.is_listed:
                _empty(opened)
        with contextlib.closing(DropEventReader(self.loaded)) as events:
            collections.deque(events.read(), maxlen=0)

    def _open_pins(self) -> None:
        for path in self.pins.root.rglob("*"):
            if path.is_file() and path not in self._pinned:
                self._pinned[path] = syscalls.open_pin(str(path))


def _write(opened: maps.Map, wanted: list[tuple[int, bytes]]) -> None:
    size = opened.value_size
    for (first, part), (_, found) in zip(wanted, _parts(opened), strict=True):
        if found == part:
            continue
        for at in range(0, len(part), size):
            value = part[at : at + size]
            if found[at : at + size] != value:
                opened.set((first + at // size).to_bytes(4, "little"), value)


def _parts(opened: maps.Map) -> Iterator[tuple[int, bytes]]:
    """All values of an array in parts: the number of the first value, and the part."""
    size, entries = opened.value_size, opened.spec.max_entries
    count = max(1, _PART_BYTES // size)
    if not opened.spec.is_mmapable:
        for first in range(0, entries, count):
            yield first, syscalls.array_values(opened.fd, count, size, first)
        return
    with mmap.mmap(opened.fd, entries * size, prot=mmap.PROT_READ) as values:
        for first in range(0, entries, count):
            yield first, values[first * size : (first + count) * size]


def _empty(opened: maps.Map) -> None:
    for key, _ in list(opened.items_by_key()):
        with contextlib.suppress(errors.BpfError):
            opened.delete(key)
