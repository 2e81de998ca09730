"""Counters of a gate or of the host's hooks between two moments."""

from bpf.gates import Counts, Gates
from bpf.verdicts import Reason, Verdict

# Packets that the kernels of host and pod send each other by themselves, at any time.
CONTROL = {(Verdict.PASS, Reason.ARP), (Verdict.PASS, Reason.CONTROL)}


class Counting:
    """The counters of one gate since the last call; without a gate, those of the host."""

    def __init__(self, gates: Gates, ifindex: int | None = None) -> None:
        self._gates = gates
        self._ifindex = ifindex
        self._before = self._now()

    def moved(self) -> dict[tuple[Verdict, Reason], int]:
        """The increase of each counter; unchanged ones are left out."""
        before, self._before = self._before, self._now()
        return {
            key: grown
            for key, count in self._before.items()
            if (grown := count - before.get(key, 0))
        }

    def moved_but_control(self) -> dict[tuple[Verdict, Reason], int]:
        """As `moved`, without the kernels' own packets."""
        return {key: grown for key, grown in self.moved().items() if key not in CONTROL}

    def _now(self) -> Counts:
        if self._ifindex is None:
            return self._gates.host_counts()
        return self._gates.counts().get(self._ifindex, {})
