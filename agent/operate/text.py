"""Times and names in words, for every view. The kubectl plugin packs it: standard library only."""

import datetime
import re

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def duration(time: datetime.timedelta) -> str:
    """As "45s", "3m", "5h" or "12d": in the largest unit of which there are two."""
    seconds = max(0, int(time.total_seconds()))
    for unit, length in _UNITS.items():
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def ago(age: datetime.timedelta) -> str:
    """As "3m ago"; a time in the future is now: a node's clock may be ahead."""
    return f"{duration(age)} ago"


def read_duration(text: str) -> datetime.timedelta | None:
    """Of "90s", "15m", "24h" or "7d"; None of any other text."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    return datetime.timedelta(seconds=int(found[1]) * _UNITS[found[2]]) if found else None


def printable(text: str) -> str:
    """Without control characters, which a terminal would obey: names and messages come from pods
    and processes."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )
