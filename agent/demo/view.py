"""The demo for people (a table that grows, in colour) and for machines (one JSON object)."""

import sys
from typing import Self

import msgspec
import rich.console
import rich.live
import rich.padding
import rich.spinner
import rich.table
import rich.text

from agent.demo import events

# Without a terminal: each row stays on one line.
_PIPED_WIDTH = 140

_HEADINGS = ("", "CHECK", "EXPECTED", "OBSERVED")


class _Collected:
    """The checks and timings, for both views."""

    def __init__(self) -> None:
        self.checks: list[events.Check] = []
        self.timings_ms: dict[str, float] = {}

    @property
    def has_passed(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def __enter__(self) -> Self:
        return self

    def add(self, message: events.StageMessage) -> None:
        if isinstance(message, events.Check):
            self.checks.append(message)
        elif isinstance(message, events.Timings):
            self.timings_ms = message.timings_ms


class JsonView(_Collected):
    """Silent until the end, then {"ok", "checks", "timings_ms"} on stdout."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        checks = [
            {"name": c.name, "expected": c.expected, "observed": c.observed, "ok": c.ok}
            for c in self.checks
        ]
        document = {"ok": self.has_passed, "checks": checks, "timings_ms": self.timings_ms}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


class TextView(_Collected):
    """One row per check as it happens, a spinner for the current step, a summary at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._console = rich.console.Console()
        if not self._console.is_terminal:
            self._console.width = _PIPED_WIDTH
        self._spinner = rich.spinner.Spinner("dots", text="building a node and four pods")
        self._live = rich.live.Live(self._spinner, console=self._console, transient=True)

    def __enter__(self) -> Self:
        self._console.print("[bold]podgate demo[/]: a node, four pods, and their connections\n")
        self._console.print(_row(rich.text.Text(" "), *_HEADINGS[1:], style="bold"))
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._live.stop()
        if kind is not None:
            return
        failed = sum(not check.ok for check in self.checks)
        timings = ", ".join(
            f"{name.replace('_', ' ')} {value:g} ms" for name, value in self.timings_ms.items()
        )
        self._console.print(f"\n{timings}", style="dim", highlight=False)
        if self.has_passed:
            self._console.print(f"[bold green]All {len(self.checks)} checks passed.[/]")
        else:
            text = f"{failed} of {len(self.checks)} checks failed."
            self._console.print(f"[bold red]{text}[/]")

    def add(self, message: events.StageMessage) -> None:
        super().add(message)
        if isinstance(message, events.Step):
            self._spinner.update(text=message.text)
            if not self._console.is_terminal:
                self._console.print(f"... {message.text}", style="dim")
        elif isinstance(message, events.Check):
            mark = rich.text.Text("✓", "green") if message.ok else rich.text.Text("✗", "bold red")
            style = "" if message.ok else "red"
            self._console.print(
                _row(mark, message.name, message.expected, message.observed, style=style)
            )


def _row(mark: rich.text.Text, *cells: str, style: str) -> rich.table.Table:
    """One row: a table of its own with fixed widths, so that it can be printed at once."""
    table = rich.table.Table.grid(padding=(0, 1), expand=True)
    table.add_column(min_width=1, max_width=1, no_wrap=True)
    for ratio in (5, 3, 4):
        table.add_column(ratio=ratio, overflow="fold")
    table.add_row(mark, *(rich.text.Text(cell, style) for cell in cells))
    return table


View = JsonView | TextView
