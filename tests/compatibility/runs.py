"""Recorded runs of clusters (tests/networks/recorded), as cells by mode."""

import functools
import pathlib
from collections.abc import Callable, Collection, Iterable

from tests.compatibility.cells import NOT_TRIED, tried, unsupported
from tests.networks import records
from tests.networks.records import Row

MODES = ("audit", "enforce", "strict")
Version = Callable[[Row], str]


@functools.cache
def _record(path: pathlib.Path) -> tuple[Row, ...]:
    return tuple(records.read(path.stem).rows)


def of_records(*names: str) -> list[Row]:
    """Rows of these records; all of them, without a name."""
    found = sorted(records.RECORDED.glob("*.json"))
    return [row for path in found if not names or path.stem in names for row in _record(path)]


def of_attribute(attribute: str, prefix: str) -> list[Row]:
    """Rows of all records in which this attribute is the prefix, or continues it by a dot."""
    return [
        row
        for row in of_records()
        if (value := getattr(row, attribute)) == prefix or value.startswith(f"{prefix}.")
    ]


def by_mode(rows: Collection[Row], version: Version) -> list[str]:
    """A cell for each mode, of the tests that run in it."""
    return [cell((row for row in rows if row.mode == mode), version) for mode in MODES]


def cell(rows: Iterable[Row], version: Version) -> str:
    """The newest run, or the test of it that failed."""
    chosen = sorted(rows, key=lambda row: row.date)
    failed = [row for row in chosen if row.result != "passed"]
    if failed:
        return unsupported(f"'{failed[-1].subject}' failed on {failed[-1].date}")
    if not chosen:
        return NOT_TRIED
    return tried(chosen[-1].date, version(chosen[-1]))
