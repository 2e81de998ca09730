"""The table: every trick, with every IP version, in every topology, by each of its ways, and in
every mode. A new trick is one function and one row of `TRICKS` in its module."""

import dataclasses
from collections.abc import Iterator

from bpf.verdicts import Mode
from tests.attacks import topologies
from tests.attacks.topologies import Topology
from tests.attacks.trick import Gap, Trick
from tests.attacks.tricks import (
    forging,
    grouping,
    opening,
    planting,
    returning,
    skipping,
    speaking,
    wrapping,
)

TRICKS = (
    *opening.TRICKS,
    *returning.TRICKS,
    *grouping.TRICKS,
    *forging.TRICKS,
    *planting.TRICKS,
    *speaking.TRICKS,
    *skipping.TRICKS,
    *wrapping.TRICKS,
)
MODES = (Mode.ENFORCE, Mode.STRICT)
LABS = tuple((topology, mode) for topology in topologies.ALL for mode in MODES)
"""Each is one node with one agent."""

DIAGONAL = tuple(
    (topology, MODES[number % len(MODES)]) for number, topology in enumerate(topologies.ALL)
)
"""Each topology, and each mode, at a price that each run of the suite can pay."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A trick in one topology. gap: why it does not work there, or is a known bypass."""

    trick: Trick
    version: int
    way: str = ""
    gap: Gap | None = None

    @property
    def is_bypass(self) -> bool:
        return self.gap is not None and self.gap.is_bypass

    @property
    def is_left_out(self) -> bool:
        """It does not work even without podgate."""
        return self.gap is not None and not self.gap.is_bypass

    def __str__(self) -> str:
        by = f" by {self.way}" if self.way else ""
        return f"{self.trick}{by} over IPv{self.version}"


def cells(topology: Topology) -> Iterator[Cell]:
    """All of the topology's, in the table's order."""
    for trick in TRICKS:
        for way in topology.ways if trick.needs_way else ("",):
            for version in trick.rights:
                found = (gap for gap in trick.gaps if gap.covers(topology.name, way, version))
                yield Cell(trick, version, way, next(found, None))
