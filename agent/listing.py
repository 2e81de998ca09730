"""Names in a sentence."""

from collections.abc import Sequence


def listed(names: Sequence[str], at_most: int = 5) -> str:
    """The first names, and how many more there are. at_most: the rest would fill a screen."""
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")


def full_name(namespace: str, name: str) -> str:
    """ "namespace/name"; the name alone for what has no namespace, such as an invalid manifest."""
    return f"{namespace}/{name}" if namespace else name
