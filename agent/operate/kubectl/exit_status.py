"""Exit statuses of the plugin; those of `podgate` mean the same. 2 is argparse's: wrong usage."""

from collections.abc import Sequence

YES = 0
NO = 1
"""Or failed."""
NO_AGENT = 3
"""No agent answers."""
INTERRUPTED = 130


def of_nodes(problems: Sequence[str]) -> int:
    """problems: of each queried node, why it did not answer, or empty."""
    if problems and all(problems):
        return NO_AGENT
    return NO if any(problems) else YES
