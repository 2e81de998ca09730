"""The three contents that a cell of docs/compatibility.md can have."""

import re

NOT_TRIED = "not tried"
_CELL = re.compile(r"tried \d{4}-\d\d-\d\d \S.*|refused, because \S.*|not tried")


def tried(date: str, version: str) -> str:
    """date: of the run, as ISO 8601; version: of what was tried."""
    return _checked(f"tried {date} {version}")


def unsupported(why: str) -> str:
    """Not supported, or its last run failed. why: the end of a sentence."""
    return _checked(f"refused, because {why}")


def is_cell(text: str) -> bool:
    return _CELL.fullmatch(text) is not None


def _checked(text: str) -> str:
    if not is_cell(text):
        raise ValueError(f"'{text}' lacks its date, version or reason")
    return text
