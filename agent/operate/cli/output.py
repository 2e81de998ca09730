"""Output of commands: one document as table, wide table, JSON or YAML.

A command makes a typed document (`msgspec.Struct`), and describes tables of it by columns:

    PODS = (
        Column("POD", lambda pod: full_name(pod.namespace, pod.name)),
        Column("MODE", lambda pod: pod.mode, signal=signal_of_mode),
        Column("NETNS", lambda pod: pod.netns, is_wide=True),
    )

    output.write(report, chosen_format, lambda screen: screen.table(PODS, report.pods))

`agent.operate.cli.commands.options` has the options of the command line, which import nothing of
this.
"""

import dataclasses
import datetime
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import click
import msgspec
import rich.console
import rich.text

from agent.admin.finding_kinds import Severity
from agent.operate.cli import layout
from agent.operate.cli.commands.options import Format
from agent.operate.text import ago, printable

Row = TypeVar("Row")
Cell = str | float | datetime.datetime | Sequence[str] | None

# Of the same age as far as a reader minds: with 90 s as 1m it would jump from 59s to 1m.


class Signal(enum.Enum):
    """The danger that a text reports; its value is its colour. NO_COLOR is respected."""

    SAFE = "green"
    """Enforced, or successful."""
    CAUTION = "yellow"
    """Not as desired, or audit."""
    DANGER = "red"
    """The hole is open, or podgate does not work."""


_MODES = {"off": Signal.CAUTION, "audit": Signal.CAUTION}


def signal_of_mode(mode: str) -> Signal:
    """Of a pod's mode."""
    return _MODES.get(mode, Signal.SAFE)


_SEVERITIES = {
    Severity.OPEN: Signal.DANGER,
    Severity.BROKEN: Signal.DANGER,
    Severity.DEGRADED: Signal.CAUTION,
}


def signal_of_severity(severity: str) -> Signal | None:
    """Of a finding."""
    return _SEVERITIES.get(Severity.of(severity))


@dataclasses.dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column of a table.

    cell: its value: text, a number, a time (shown as an age, in wide tables as a time), several
    texts, or None; is_wide: only in wide tables; is_below: on a line of its own below the others,
    where the screen is too narrow for all; signal: the danger that the cell reports.
    """

    header: str
    cell: Callable[[Row], Cell]
    is_wide: bool = dataclasses.field(default=False, kw_only=True)
    is_below: bool = dataclasses.field(default=False, kw_only=True)
    signal: Callable[[Row], Signal | None] = dataclasses.field(default=lambda _: None, kw_only=True)


class Screen:
    """Where tables and lines are printed. Lines are as wide as the terminal, or as long as they
    are if output is piped: grep needs whole lines."""

    def __init__(
        self,
        *,
        is_wide: bool = False,
        console: rich.console.Console | None = None,
        now: datetime.datetime | None = None,
    ) -> None:
        self.is_wide = is_wide
        self.now = now or datetime.datetime.now(datetime.UTC)
        self._console = console or rich.console.Console()
        is_limited = console is not None or self._console.is_terminal
        self._width = self._console.width if is_limited else None

    def line(self, text: str = "", signal: Signal | None = None) -> None:
        """Print a sentence, wrapped between words."""
        styled = rich.text.Text(printable(text), style=signal.value if signal else "")
        self._console.print(styled, soft_wrap=self._width is None)

    def table(self, columns: Sequence[Column[Row]], rows: Iterable[Row]) -> None:
        """Print a table, with the columns for wide tables if they are wanted."""
        shown = [column for column in columns if self.is_wide or not column.is_wide]
        rows = list(rows)
        heads = [
            layout.Head(column.header, _is_number(column, rows), column.is_below)
            for column in shown
        ]
        cells = [[self._cell(column, row) for column in shown] for row in rows]
        for line in layout.lines(heads, cells, self._width):
            self._console.print(line, soft_wrap=True)

    def age(self, at: datetime.datetime) -> str:
        """As "3m ago", in wide output the time itself."""
        return time_text(at) if self.is_wide else ago(self.now - at)

    def _cell(self, column: Column[Row], row: Row) -> rich.text.Text:
        value = column.cell(row)
        if isinstance(value, datetime.datetime):
            text = self.age(value)
        elif value is None:
            text = ""
        else:
            text = str(value) if isinstance(value, str | float | int) else ", ".join(value)
        signal = column.signal(row)
        return rich.text.Text(printable(text) or "-", style=signal.value if signal else "")


def write(document: object, form: Format, view: Callable[[Screen], None]) -> None:
    """Print a document: as JSON in one line, as a document of YAML, or by its view."""
    if form is Format.JSON:
        click.echo(msgspec.json.encode(document))
    elif form is Format.YAML:
        click.echo(b"---\n" + msgspec.yaml.encode(document), nl=False)
    else:
        view(Screen(is_wide=form is Format.WIDE))


def sort(rows: Sequence[Row], columns: Sequence[Column[Row]], header: str) -> list[Row]:
    """Rows by the column of that header, in any case; numbers and times the largest first.

    No header: the order that they have. Raises `click.BadParameter`.
    """
    if not header:
        return list(rows)
    by_header = {column.header.lower(): column for column in columns}
    column = by_header.get(header.lower())
    if column is None:
        names = ", ".join(by_header)
        raise click.BadParameter(f"{header!r} is no column; use {names}", param_hint="--sort")
    cell = column.cell
    present = [row for row in rows if cell(row) not in (None, "")]
    absent = [row for row in rows if cell(row) in (None, "")]
    is_descending = any(not isinstance(cell(row), str | Sequence) for row in present)
    key: Callable[[Row], Any] = cell
    return sorted(present, key=key, reverse=is_descending) + absent


def time_text(at: datetime.datetime) -> str:
    """As "2026-01-31 08:00:00Z"."""
    return f"{at.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}Z"


def _is_number(column: Column[Row], rows: Sequence[Row]) -> bool:
    values = [column.cell(row) for row in rows]
    return any(isinstance(value, float | int) for value in values)
