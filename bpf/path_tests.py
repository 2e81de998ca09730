"""Counters of path tests: SYNs to TCP port 0, which show whether packets pass the gate.

No process can listen on port 0 (bind(2) reads it as "any"). So no other program has a reason to
send there, a SYN that arrives does no harm, and gates count it under a reason of its own.
"""

import array
import struct
from collections.abc import Collection

from bpf import abi, loader
from bpf.verdicts import Reason, Verdict

PORT = 0

_IFINDEX = struct.Struct("=I")
_SLOT = Verdict.DROP * abi.REASON_SLOTS + Reason.PATH_TEST


class PathTestCounters:
    """Reads the gates' counters; every method takes microseconds."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._counters = loaded.map(abi.COUNTERS)

    def dropped_by(self, ifindexes: Collection[int]) -> int:
        """Number of path tests that these gates have dropped so far."""
        values = (self._counters.get(_IFINDEX.pack(ifindex)) for ifindex in ifindexes)
        slots = abi.VERDICT_COUNT * abi.REASON_SLOTS
        return sum(sum(array.array("Q", value)[_SLOT::slots]) for value in values if value)
