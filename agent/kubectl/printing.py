"""What the plugin prints: results to standard output, progress and problems to standard error."""

import sys
from collections.abc import Sequence


def line(text: str = "") -> None:
    """At once: a command may watch for an hour, and its output may be a pipe."""
    print(text, flush=True)  # noqa: T201


def progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def table(rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their longest cell, but for the last."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        line("  ".join(cells).rstrip())
