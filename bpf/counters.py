"""Counters of gates: host-sent packets by verdict and reason.

All CPUs share them but for the two reasons that count most packets, which each CPU counts itself.
"""

import array
import struct
from collections.abc import Mapping

from bpf import abi, loader, map_specs
from bpf.verdicts import Reason, Verdict

Counts = Mapping[tuple[Verdict, Reason], int]
"""Without zeros."""

_NUMBER = struct.Struct("=I")
_PACKETS = struct.Struct("=Q")


def labelled(counts: Counts) -> dict[str, dict[str, int]]:
    """Counts by the labels of verdict and reason: {"drop": {"node": 2}}."""
    found: dict[str, dict[str, int]] = {}
    for (verdict, reason), count in sorted(counts.items()):
        found.setdefault(verdict.label, {})[reason.label] = count
    return found


class Counters:
    """Reader of all counters; methods take microseconds for each gate."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._slots = loaded.map(map_specs.GATE_SLOTS)
        self._counters = loaded.map(map_specs.COUNTERS)
        self._frequent = loaded.map(map_specs.FREQUENT_COUNTS)

    def all_gates(self) -> dict[int, Counts]:
        """By interface."""
        return {
            _NUMBER.unpack(key)[0]: self._read(_NUMBER.unpack(slot)[0])
            for key, slot in list(self._slots.items())
        }

    def of_gate(self, ifindex: int) -> Counts:
        """Empty for an interface without a gate."""
        slot = self._slots.get(_NUMBER.pack(ifindex))
        return self._read(_NUMBER.unpack(slot)[0]) if slot else {}

    def of_reason(self, ifindex: int, verdict: Verdict, reason: Reason) -> int:
        """One counter of a gate, without reading the others; 0 for an interface without a gate.

        Not of the two reasons that each CPU counts.
        """
        assert reason not in (Reason.ESTABLISHED, Reason.NODE)
        slot = self._slots.get(_NUMBER.pack(ifindex))
        value = self._counters.get(slot) if slot else None
        if value is None:
            return 0
        (packets,) = _PACKETS.unpack_from(value, _index(verdict, reason) * _PACKETS.size)
        return int(packets)

    def of_host(self) -> Counts:
        """Drops that no gate counts: before an interface was chosen, by hooks and the tunnel gate,
        and of gates that found no slot.
        """
        host, fallback = self._read(abi.HOST_SLOT), self._read(abi.FALLBACK_SLOT)
        return {
            key: host.get(key, 0) + fallback.get(key, 0) for key in host.keys() | fallback.keys()
        }

    def _read(self, slot: int) -> Counts:
        key = _NUMBER.pack(slot)
        value, frequent = self._counters.get(key), self._frequent.get(key)
        assert value is not None  # an array has all of its keys
        assert frequent is not None
        packets, of_cpus = array.array("Q", value), array.array("Q", frequent)
        packets[Reason.ESTABLISHED] += sum(of_cpus[0::2])
        packets[Reason.NODE] += sum(of_cpus[1::2])
        counts = {}
        for reason in Reason:
            decided = Verdict.DROP if reason.is_drop else Verdict.PASS
            for verdict in (decided, Verdict.WOULD_DROP):
                counts[verdict, reason] = packets[_index(verdict, reason)]
        return {key: count for key, count in counts.items() if count}


def _index(verdict: Verdict, reason: Reason) -> int:
    """In a slot's counts."""
    return reason + abi.REASON_SLOTS * (verdict is Verdict.WOULD_DROP)
