"""Drop events: single drops as they happen, sampled by the kernel (16 per 0.1 s and CPU)."""

import array
import dataclasses

from bpf import abi, loader, map_specs, ringbuffer
from bpf.verdicts import Reason, Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class DropEvent:
    """One dropped packet or rejected system call.

    at_ns: CLOCK_MONOTONIC; cgroup: id, 0 without a socket; ifindex: the gate's, 0 if no interface
    was chosen yet; source: None if no source address was chosen yet; pid (in the initial PID
    namespace) and process_name: 0 and empty where the kernel does not provide them. Ports are 0 for
    protocols without ports.
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
    pid: int
    process_name: str


class DropEventReader:
    """The one reader of the ring."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._map = loaded.map(map_specs.DROP_EVENTS)
        self._budgets = loaded.map(map_specs.EVENT_BUDGET), loaded.map(map_specs.PACKET_BUDGET)
        self._ring = ringbuffer.RingBuffer(self._map.fd, abi.EVENT_RING_BYTES)

    def close(self) -> None:
        self._ring.close()

    def fileno(self) -> int:
        """Polls readable when there are events."""
        return self._map.fd

    def read(self) -> list[DropEvent]:
        """All events since the last call."""
        return [
            _drop_event(abi.CDropEvent.from_buffer_copy(record)) for record in self._ring.records()
        ]

    def lost(self) -> int:
        """Number of events suppressed by rate limiting, since the map was created."""
        words = array.array("Q", b"".join(budget.get(bytes(4)) or b"" for budget in self._budgets))
        suppressed_at = abi.CEventBudget.suppressed.offset // words.itemsize
        size = len(bytes(abi.CEventBudget())) // words.itemsize
        return sum(words[suppressed_at::size])


def _drop_event(event: abi.CDropEvent) -> DropEvent:
    return DropEvent(
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
        pid=event.pid,
        process_name=event.process_name.decode(errors="replace"),
    )


def _address(packed: abi.CAddress) -> abi.IPAddress | None:
    content = bytes(packed)
    return abi.unpack_address(content) if any(content) else None
