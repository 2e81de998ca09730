"""What the gates refused of self-tests: SYNs to TCP port 0 that ask whether a gate is on the way.

Nobody can listen on port 0 (bind(2) takes it for "any"), so nobody else has a reason to send there,
one that arrives does no harm, and gates have a reason of their own for it.
"""

import array
import struct
from collections.abc import Collection

from bpf import abi, loader
from bpf.verdicts import Reason, Verdict

PORT = 0

_IFINDEX = struct.Struct("=I")
_SLOT = Verdict.DROP * abi.REASON_SLOTS + Reason.SELF_TEST


class SelfTests:
    """Reads the counters only; every method takes microseconds."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._counters = loaded.map(abi.COUNTERS)

    def refused_by(self, ifindexes: Collection[int]) -> int:
        """How many self-tests these gates have refused so far."""
        values = (self._counters.get(_IFINDEX.pack(ifindex)) for ifindex in ifindexes)
        slots = abi.VERDICT_COUNT * abi.REASON_SLOTS
        return sum(sum(array.array("Q", value)[_SLOT::slots]) for value in values if value)
