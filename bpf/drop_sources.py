"""Drop sources: the kernel's aggregate of drops by source cgroup, gate, protocol and port."""

import array
import dataclasses
from collections.abc import Container

from bpf import abi, loader


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

    def forget(self, ifindex: int) -> None:
        """Delete the sources of one interface."""
        for key, _ in list(self._sources.items()):
            if abi.CDropSourceKey.from_buffer_copy(key).ifindex == ifindex:
                self._sources.delete(key)

    def prune(self, live: Container[int]) -> None:
        """Delete sources of interfaces that are not in `live`."""
        for key, _ in list(self._sources.items()):
            if abi.CDropSourceKey.from_buffer_copy(key).ifindex not in live:
                self._sources.delete(key)


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
