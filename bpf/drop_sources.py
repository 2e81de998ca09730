"""Drop sources: the kernel's aggregate of drops by source cgroup, gate, protocol and port."""

import array
import dataclasses
import sys
from collections.abc import Container, Iterator
from typing import Any

from bpf import abi, loader


def _field(field: Any) -> slice:
    return slice(field.offset, field.offset + field.size)


# Thousands of keys are read at a time, and a ctypes structure for each takes ten times as long.
_CGROUP = _field(abi.CDropSourceKey.cgroup)
_IFINDEX = _field(abi.CDropSourceKey.ifindex)


@dataclasses.dataclass(frozen=True, slots=True)
class DropSource:
    """Dropped packets of one source cgroup to one port of one pod.

    cgroup: id, 0 without a socket; times: CLOCK_MONOTONIC in nanoseconds; count: packets;
    process_name: of the first packet's process, empty where the kernel does not provide it.
    """

    cgroup: int
    ifindex: int
    protocol: int
    port: int
    first_ns: int
    last_ns: int
    count: int
    process_name: str


class DropSources:
    """Reader of the aggregate, which outlives the agent."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._sources = loaded.map(abi.DROP_SOURCES)
        self._lost = loaded.map(abi.DROP_SOURCES_LOST)

    def read(self) -> list[DropSource]:
        """All sources, in no order."""
        return [_drop_source(key, value) for key, value in self._sources.items()]

    def lost(self) -> int:
        """Packets not recorded because the map was full, since the map was created."""
        return sum(array.array("Q", self._lost.get(bytes(4)) or b""))

    def cgroups(self) -> set[int]:
        """The cgroups of all sources; a tenth of what `read` costs."""
        return set(map(_cgroup_of, self._keys()))

    def forget(self, ifindex: int) -> None:
        """Delete the sources of one interface."""
        for key in [key for key in self._keys() if _ifindex_of(key) == ifindex]:
            self._sources.delete(key)

    def prune(self, live: Container[int]) -> None:
        """Delete sources of interfaces that are not in `live`."""
        for key in [key for key in self._keys() if _ifindex_of(key) not in live]:
            self._sources.delete(key)

    def _keys(self) -> Iterator[bytes]:
        return (key for key, _ in self._sources.items())


def _cgroup_of(key: bytes) -> int:
    return int.from_bytes(key[_CGROUP], sys.byteorder)


def _ifindex_of(key: bytes) -> int:
    return int.from_bytes(key[_IFINDEX], sys.byteorder)


def _drop_source(key: bytes, value: bytes) -> DropSource:
    packed_key = abi.CDropSourceKey.from_buffer_copy(key)
    packed = abi.CDropSource.from_buffer_copy(value)
    return DropSource(
        cgroup=packed_key.cgroup,
        ifindex=packed_key.ifindex,
        protocol=packed_key.protocol,
        port=packed_key.port,
        first_ns=packed.first_ns,
        last_ns=packed.last_ns,
        count=packed.count,
        process_name=packed.process_name.decode(errors="replace"),
    )
