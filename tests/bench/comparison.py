"""A run beside the recorded one: ratios that are worse than all that was recorded."""

from collections.abc import Iterable, Iterator

from tests.bench.figures import Figure
from tests.bench.goals import goal_of


def regressions(recorded: Iterable[Figure], measured: Iterable[Figure]) -> Iterator[str]:
    """A sentence for each. A figure of one machine is not compared, one that
    was recorded and is not measured is a regression."""
    found = {figure.figure: figure for figure in measured}
    for before in recorded:
        if before.compared is None:
            continue
        after = found.get(before.figure)
        if after is None or after.compared is None:
            yield f"{before.figure} was not measured."
            continue
        _, (smallest, largest) = before.compared
        value, _ = after.compared
        goal = goal_of(before)
        is_worse = value < smallest if goal and goal.is_least else value > largest
        if is_worse:
            yield f"{before.figure} is {value:g}; recorded were {smallest:g} to {largest:g}."
