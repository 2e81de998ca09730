"""Counters of gates: host-sent packets by verdict and reason. All CPUs share them."""

import array
import struct
from collections.abc import Mapping

from bpf import abi, loader
from bpf.verdicts import Reason, Verdict

Counts = Mapping[tuple[Verdict, Reason], int]
"""Without zeros."""

_NUMBER = struct.Struct("=I")


class Counters:
    """Reader of all counters; methods take microseconds for each gate."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._slots = loaded.map(abi.GATE_SLOTS)
        self._counters = loaded.map(abi.COUNTERS)

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

    def of_host(self) -> Counts:
        """Drops that no gate counts: before an interface was chosen, by hooks and the tunnel gate,
        and of gates that found no slot.
        """
        host, fallback = self._read(abi.HOST_SLOT), self._read(abi.FALLBACK_SLOT)
        return {
            key: host.get(key, 0) + fallback.get(key, 0) for key in host.keys() | fallback.keys()
        }

    def _read(self, slot: int) -> Counts:
        value = self._counters.get(_NUMBER.pack(slot))
        assert value is not None  # an array has all of its keys
        packets = array.array("Q", value)
        counts = {}
        for reason in Reason:
            decided = Verdict.DROP if reason.is_drop else Verdict.PASS
            counts[decided, reason] = packets[reason]
            counts[Verdict.WOULD_DROP, reason] = packets[abi.REASON_SLOTS + reason]
        return {key: count for key, count in counts.items() if count}
