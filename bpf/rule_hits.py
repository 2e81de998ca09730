"""Hit counters of rules: new flows that each rule admitted, over all gates."""

import array
import struct
from collections.abc import Container, Iterable

from bpf import loader, map_specs

_KEY = struct.Struct("=I")


class RuleHits:
    """The counters, by rule id; gates count existing ids only. They outlive the agent."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._map = loaded.map(map_specs.RULE_HITS)

    def add(self, ids: Iterable[int]) -> None:
        """Create missing counters; existing ones keep their count.

        Raises `BpfError` when the map is full (65,536 ids).
        """
        for number in ids:
            key = _KEY.pack(number)
            if self._map.get(key) is None:
                self._map.set(key, bytes(self._map.value_size))

    def read(self) -> dict[int, int]:
        """Admitted new flows by id, summed over CPUs."""
        return {
            _KEY.unpack(key)[0]: sum(array.array("Q", value)) for key, value in self._map.items()
        }

    def retain(self, ids: Container[int]) -> None:
        """Remove the counters of all others."""
        for key, _ in list(self._map.items()):
            if _KEY.unpack(key)[0] not in ids:
                self._map.delete(key)
