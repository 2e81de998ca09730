"""The pinned maps of any kind: their sizes, and their entries as plain objects."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from agent.operate.pinned.installation import PinsUnreadableError, find_schema
from bpf import errors, listeners, map_specs, map_values, maps, pins
from bpf.services import tables

_TYPES = {
    **{1: "hash", 2: "array", 5: "percpu_hash", 6: "percpu_array", 9: "lru_hash"},
    **{11: "lpm_trie", 13: "hash_of_maps", 24: "sk_storage", 27: "ringbuf"},
}
"""bpftool's names of `enum bpf_map_type`."""

SPECS = {spec.name: spec for spec in (*map_specs.MAPS, *listeners.MAPS, *tables.MAPS)}
_ARRAYS = ("array", "percpu_array")


class MapStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One map. path: its pin; used: entries, of an array those that are not zero, None for a ring
    buffer and for sockets' storage; memory_bytes: as the kernel counts it; has_types: whether
    bpftool can decode it.
    """

    name: str
    path: str
    type: str
    used: int | None
    capacity: int
    memory_bytes: int
    has_types: bool


class MapEntry(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One entry; names of fields are those of bpf/src. values: one for each CPU, in place of
    `value`."""

    key: Any
    value: Any = None
    values: list[Any] = []


class MapContent(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One map's entries. empty: how many of an array's are all zero, and left out; left_out: how
    many others are."""

    name: str
    entries: list[MapEntry]
    empty: int = 0
    left_out: int = 0


def paths(installation: pins.Pins) -> dict[str, pathlib.Path]:
    """Pins of all maps by name, of this schema and of the proxy. Raises `PinsUnreadableError`."""
    find_schema(installation)
    found = [path for path in installation.root.rglob("*") if path.name in SPECS]
    others = installation.other_schemas()
    return {
        path.name: path
        for path in sorted(found, key=lambda path: path.name)
        if not any(path.is_relative_to(other) for other in others)
    }


def read(found: Mapping[str, pathlib.Path]) -> list[MapStatus]:
    """These maps. found: of `paths`. Raises `PinsUnreadableError`."""
    return [_status(path) for path in found.values()]


def entries(path: pathlib.Path) -> MapContent:
    """The entries of a map as plain objects. Raises `PinsUnreadableError`."""
    with _opened(path) as opened:
        found, empty = [], 0
        for key, value in _items(opened):
            if _TYPES[opened.spec.type] in _ARRAYS and not any(value):
                empty += 1
            else:
                found.append(_entry(opened.spec, key, value))
        return MapContent(name=path.name, entries=found, empty=empty)


def _entry(spec: map_specs.MapSpec, key: bytes, value: bytes) -> MapEntry:
    decoded = map_values.decode(spec.key, key)
    if not spec.is_per_cpu:
        return MapEntry(key=decoded, value=map_values.decode(spec.value, value))
    return MapEntry(
        key=decoded, values=[map_values.decode(spec.value, one) for one in cpus(spec, value)]
    )


def cpus(spec: map_specs.MapSpec, value: bytes) -> Iterator[bytes]:
    """The values of the CPUs."""
    for at in range(0, len(value), spec.value_size):
        yield value[at : at + spec.value_size]


def _status(path: pathlib.Path) -> MapStatus:
    with _opened(path) as opened:
        spec = opened.spec
        is_array = _TYPES[spec.type] in _ARRAYS
        used = None
        if spec.is_listed:
            used = sum(1 for _, value in _items(opened) if not is_array or any(value))
        return MapStatus(
            name=spec.name,
            path=str(path),
            type=_TYPES[spec.type],
            used=used,
            capacity=spec.max_entries,
            memory_bytes=_memory_bytes(opened.fd, opened.spec),
            has_types=maps.has_types(opened.fd),
        )


def _opened(path: pathlib.Path) -> maps.Map:
    try:
        return maps.Map.open(str(path), SPECS[path.name])
    except errors.PinError as error:
        raise PinsUnreadableError(str(error)) from error


def _items(opened: maps.Map) -> Iterator[tuple[bytes, bytes]]:
    if not opened.spec.is_listed:
        return iter(())
    # Batches are for what has many entries: 131,072 words of `injectable`.
    is_plain = _TYPES[opened.spec.type] in ("array", "hash", "lru_hash")
    if is_plain:
        try:
            return iter(list(opened.items()))
        except errors.BpfError:  # a hash bucket with more entries than a batch
            pass
    return opened.items_by_key()


def _memory_bytes(fd: int, spec: map_specs.MapSpec) -> int:
    """As the kernel reports it to any reader of a descriptor (`bpf_map_show_fdinfo`).

    Before 6.4 (`ringbuf_map_mem_usage` in kernel/bpf/ringbuf.c) it reports 0 for a ring buffer:
    then its size.
    """
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        for line in file:
            name, _, number = line.partition(":")
            if name == "memlock" and int(number):
                return int(number)
    return spec.max_entries if _TYPES[spec.type] == "ringbuf" else 0
