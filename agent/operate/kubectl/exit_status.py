"""Exit statuses of the plugin; those of `podgate` mean the same."""

from collections.abc import Sequence

YES = 0
NO = 1
"""Or failed."""
USAGE = 2
"""argparse's."""
NO_AGENT = 3
"""No agent answers."""
INTERRUPTED = 130


def of_nodes(problems: Sequence[str]) -> int:
    """problems: of each queried node, why it did not answer, or empty."""
    if problems and all(problems):
        return NO_AGENT
    return NO if any(problems) else YES
