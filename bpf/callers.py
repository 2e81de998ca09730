"""Who of the node started what to which pod, and would need a rule: the aggregate of the gates."""

import array
import dataclasses
from collections.abc import Container

from bpf import abi, loader


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One sender, pod, protocol and port.

    cgroup: id, 0 when no socket was known; times: CLOCK_MONOTONIC in nanoseconds; count: packets;
    name: the process at first sight, empty where the kernel does not say.
    """

    cgroup: int
    ifindex: int
    protocol: int
    port: int
    first_ns: int
    last_ns: int
    count: int
    name: str


class Callers:
    """Reads and prunes the aggregate, which outlives the agent."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._callers = loaded.map(abi.CALLERS)
        self._lost = loaded.map(abi.CALLERS_LOST)

    def read(self) -> list[Seen]:
        """All callers, in no order."""
        return [_seen(key, value) for key, value in self._callers.items()]

    def lost(self) -> int:
        """Packets whose sender found no place, since the map was made."""
        return sum(array.array("Q", self._lost.get(bytes(4)) or b""))

    def forget(self, ifindex: int) -> None:
        """Forget the callers of one interface."""
        for key, _ in list(self._callers.items()):
            if abi.CallerKey.from_buffer_copy(key).ifindex == ifindex:
                self._callers.delete(key)

    def prune(self, live: Container[int]) -> None:
        """Forget callers of interfaces that are not among `live`."""
        for key, _ in list(self._callers.items()):
            if abi.CallerKey.from_buffer_copy(key).ifindex not in live:
                self._callers.delete(key)


def _seen(key: bytes, value: bytes) -> Seen:
    who = abi.CallerKey.from_buffer_copy(key)
    what = abi.Caller.from_buffer_copy(value)
    return Seen(
        cgroup=who.cgroup,
        ifindex=who.ifindex,
        protocol=who.protocol,
        port=who.port,
        first_ns=what.first_ns,
        last_ns=what.last_ns,
        count=what.count,
        name=what.name.decode(errors="replace"),
    )
