"""Drop sources: the kernel's aggregate of drops by source cgroup, gate, protocol, port and mode.

Each cgroup has a share of the table (src/drop_sources.h), and a full table forgets the oldest
sources.
"""

import array
import collections
import dataclasses
import struct
import sys
from typing import Any

from bpf import abi, loader, map_specs
from bpf.verdicts import Mode

# TCP, UDP, DCCP, SCTP and UDP-Lite: of these MANY_PORTS is no port.
_WITH_PORTS = frozenset({6, 17, 33, 132, 136})
_CGROUP = struct.Struct("=Q")
_COUNT = struct.Struct("=I")


def _field(field: Any) -> slice:
    return slice(field.offset, field.offset + field.size)


# Thousands of keys are read at a time, and a ctypes structure for each takes ten times as long.
_KEY_CGROUP = _field(abi.CDropSourceKey.cgroup)
_KEY_IFINDEX = _field(abi.CDropSourceKey.ifindex)


@dataclasses.dataclass(frozen=True, slots=True)
class DropSource:
    """Dropped packets of one source cgroup to one port of one pod, in one mode of its gate.

    cgroup: id, 0 without a socket; port: 0 for protocols without, and for many ports; mode: the
    gate's when it handled these packets, so those of audit have passed; times:
    CLOCK_MONOTONIC in nanoseconds; count: packets; process_name: of the first packet's process,
    empty where the kernel does not provide it.
    """

    cgroup: int
    ifindex: int
    protocol: int
    port: int
    first_ns: int
    last_ns: int
    count: int
    process_name: str
    mode: Mode

    @property
    def has_many_ports(self) -> bool:
        """Whether these are all further ports of a cgroup that has used up its share."""
        return self.port == abi.MANY_PORTS and self.protocol in _WITH_PORTS


class DropSources:
    """Reader of the aggregate, which outlives the agent."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._sources = loaded.map(map_specs.DROP_SOURCES)
        self._cgroups = loaded.map(map_specs.SOURCE_CGROUPS)
        self._recent = loaded.map(map_specs.RECENT_SOURCE)
        self._lost = loaded.map(map_specs.DROP_SOURCES_LOST)

    def cgroups(self) -> set[int]:
        """Ids of all cgroups with an entry; costs as many reads as there are cgroups."""
        return {_CGROUP.unpack(key)[0] for key, _ in self._cgroups.items()}

    def read(self) -> list[DropSource]:
        """All sources, in no order. Costs as many reads as there are entries."""
        entries = {key: abi.CDropSource.from_buffer_copy(v) for key, v in self._sources.items()}
        for recent in self._read_recent():
            if entry := entries.get(bytes(recent.key)):
                entry.count += recent.packets
                entry.last_ns = max(entry.last_ns, recent.last_ns)
        return [_drop_source(key, entry) for key, entry in entries.items()]

    def lost(self) -> int:
        """Packets for whose source there was no memory, since the map was created."""
        return sum(array.array("Q", self._lost.get(bytes(4)) or b""))

    def forget(self, *interfaces: int) -> None:
        """Delete the sources of these interfaces, and return their cgroups' shares, with those of
        sources that the kernel has forgotten.
        """
        shrunk: set[int] = set()
        left: collections.Counter[int] = collections.Counter()
        for key, _ in list(self._sources.items()):
            cgroup = int.from_bytes(key[_KEY_CGROUP], sys.byteorder)
            if int.from_bytes(key[_KEY_IFINDEX], sys.byteorder) in interfaces:
                self._sources.delete(key)
                shrunk.add(cgroup)
            else:
                left[cgroup] += 1
        for cgroup in shrunk | self.cgroups():
            if not left[cgroup]:
                self._cgroups.delete(_CGROUP.pack(cgroup))
            elif cgroup in shrunk:
                self._cgroups.set(_CGROUP.pack(cgroup), _COUNT.pack(left[cgroup]))

    def _read_recent(self) -> list[abi.CRecentSource]:
        """What each CPU has not added to the table yet."""
        value = self._recent.get(bytes(4))
        assert value is not None  # an array has all of its keys
        size = map_specs.RECENT_SOURCE.value_size
        return [abi.CRecentSource.from_buffer_copy(value, at) for at in range(0, len(value), size)]


def _drop_source(key: bytes, entry: abi.CDropSource) -> DropSource:
    packed = abi.CDropSourceKey.from_buffer_copy(key)
    return DropSource(
        cgroup=packed.cgroup,
        ifindex=packed.ifindex,
        protocol=packed.protocol,
        port=packed.port,
        first_ns=entry.first_ns,
        last_ns=entry.last_ns,
        count=entry.count,
        process_name=entry.process_name.decode(errors="replace"),
        mode=Mode(packed.mode),
    )
