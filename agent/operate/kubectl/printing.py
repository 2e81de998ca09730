"""What the plugin prints: results to standard output, progress and problems to standard error."""

import dataclasses
import os
import sys
from collections.abc import Sequence

from agent.operate.text import printable

RED, YELLOW, GREEN = 31, 33, 32
"""Colours by danger: open or broken, not as desired or audit, enforced."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table in a colour."""

    text: str
    colour: int = 0


def line(text: str = "") -> None:
    """At once: a command may watch for an hour, and its output may be a pipe."""
    print(text, flush=True)  # noqa: T201


def progress(text: str) -> None:
    sys.stderr.write(f"{printable(text)}\n")


def table(rows: Sequence[Sequence[str | Cell]]) -> None:
    """Columns as wide as their longest cell, but for the last."""
    if not rows:
        return
    cells = [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in rows]
    widths = [max(len(row[column].text) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        padding = [width - len(one.text) for one, width in zip(row, widths, strict=True)]
        padding[-1] = 0
        padded = [coloured(one) + " " * n for one, n in zip(row, padding, strict=True)]
        line("  ".join(padded).rstrip())


def coloured(cell: Cell) -> str:
    """In colour if the output is a terminal, and NO_COLOR is unset (https://no-color.org)."""
    text = printable(cell.text)
    if not cell.colour or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return f"\x1b[{cell.colour}m{text}\x1b[0m"
