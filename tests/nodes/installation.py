"""An installation that a worker loads once: each test finds it as it was loaded.

The verifier takes half a second of CPU time for podgate's programs, which is more than an agent and
its test take.
"""

import asyncio
import collections
import contextlib
import os
import pathlib

from bpf import errors, loader, maps, pins, syscalls
from bpf.drop_events import DropEventReader

_ARRAYS = (2, 6)  # BPF_MAP_TYPE_ARRAY and BPF_MAP_TYPE_PERCPU_ARRAY of linux/bpf.h


class Installation:
    """Loaded programs, and maps with what they held then."""

    def __init__(self, bpffs: pathlib.Path) -> None:
        """Loads and pins them. Raises as `loader.load`."""
        self.pins = pins.Pins(bpffs)
        self.loaded = asyncio.run(loader.load(self.pins))
        self._pinned: dict[pathlib.Path, int] = {}
        self._open_pins()
        self._arrays = {
            name: opened.array_values()
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


def _write(opened: maps.Map, wanted: bytes) -> None:
    found = opened.array_values()
    if found == wanted:
        return
    size = opened.value_size
    for number in range(opened.spec.max_entries):
        value = wanted[number * size : (number + 1) * size]
        if found[number * size : (number + 1) * size] != value:
            opened.set(number.to_bytes(4, "little"), value)


def _empty(opened: maps.Map) -> None:
    for key, _ in list(opened.items_by_key()):
        with contextlib.suppress(errors.BpfError):
            opened.delete(key)
