"""Single refusals as they happen, sampled: the kernel tells a few for each tenth of a second."""

import array
import dataclasses

from bpf import abi, loader, ringbuffer
from bpf.verdicts import Reason, Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """One packet or system call. at_ns: CLOCK_MONOTONIC; cgroup: id, 0 when no socket was known.

    ifindex: of the gate, 0 when refused before an interface was chosen; source: None when it was
    refused before there was one; process: its id as the node's first PID namespace numbers it, and
    name, 0 and empty where the kernel does not say. Ports are 0 for protocols without.
    """

    at_ns: int
    verdict: Verdict
    reason: Reason
    ifindex: int
    protocol: int
    source: abi.IPAddress | None
    source_port: int
    destination: abi.IPAddress | None
    destination_port: int
    cgroup: int
    process: int
    name: str


class Events:
    """The one reader of the ring."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._map = loaded.map(abi.EVENTS)
        self._budget = loaded.map(abi.EVENT_BUDGET)
        self._ring = ringbuffer.RingBuffer(self._map.fd, abi.EVENT_RING_BYTES)

    def close(self) -> None:
        self._ring.close()

    def fileno(self) -> int:
        """Readable when something was refused."""
        return self._map.fd

    def read(self) -> list[Refusal]:
        """All that have come since the last call."""
        return [_refusal(abi.Event.from_buffer_copy(record)) for record in self._ring.records()]

    def lost(self) -> int:
        """How many refusals were not told, since the map was made."""
        value = self._budget.get(bytes(4)) or b""
        words = array.array("Q", value)
        lost_at = abi.EventBudget.lost.offset // words.itemsize
        size = len(bytes(abi.EventBudget())) // words.itemsize
        return sum(words[lost_at::size])


def _refusal(event: abi.Event) -> Refusal:
    return Refusal(
        at_ns=event.at_ns,
        verdict=Verdict(event.verdict),
        reason=Reason(event.reason),
        ifindex=event.ifindex,
        protocol=event.protocol,
        source=_address(event.source),
        source_port=event.source_port,
        destination=_address(event.destination),
        destination_port=event.destination_port,
        cgroup=event.cgroup,
        process=event.process,
        name=event.name.decode(errors="replace"),
    )


def _address(packed: abi.Address) -> abi.IPAddress | None:
    content = bytes(packed)
    return abi.unpack_address(content) if any(content) else None
