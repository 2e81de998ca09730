"""Counters of path tests: SYNs to TCP port 0, which show whether packets pass the gate.

No process can listen on port 0 (bind(2) reads it as "any"). So no other program has a reason to
send there, a SYN that arrives does no harm, and gates count it under a reason of its own.
"""

from collections.abc import Collection

from bpf import loader
from bpf.counters import Counters
from bpf.verdicts import Reason, Verdict

PORT = 0


class PathTestCounters:
    """Reads the gates' counters; every method takes microseconds."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._counters = Counters(loaded)

    def dropped_by(self, ifindexes: Collection[int]) -> int:
        """Number of path tests that these gates have dropped so far."""
        return self._count(ifindexes, Verdict.DROP, Reason.PATH_TEST)

    def probes_admitted_by(self, ifindexes: Collection[int]) -> int:
        """Number of new connections of the kubelet that these gates have admitted so far."""
        return self._count(ifindexes, Verdict.PASS, Reason.PROBE)

    def _count(self, ifindexes: Collection[int], verdict: Verdict, reason: Reason) -> int:
        return sum(self._counters.of_reason(ifindex, verdict, reason) for ifindex in ifindexes)
