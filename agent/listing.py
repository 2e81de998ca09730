"""Names in a sentence."""

from collections.abc import Sequence


def listed(names: Sequence[str], at_most: int = 5) -> str:
    """The first names, and how many more there are. at_most: the rest would fill a screen."""
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")
