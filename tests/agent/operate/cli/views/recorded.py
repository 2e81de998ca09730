"""A screen that keeps what a view prints, with the danger that each text reports."""

from collections.abc import Iterable, Sequence

from agent.operate.cli.output import Column, Row, Screen, Signal


class RecordedScreen(Screen):
    """`lines` are sentences, `cells` the coloured cells of all tables, by column and text."""

    def __init__(self, *, is_wide: bool = False) -> None:
        super().__init__(is_wide=is_wide)
        self.lines: list[tuple[str, Signal | None]] = []
        self.cells: dict[tuple[str, str], Signal] = {}

    def line(self, text: str = "", signal: Signal | None = None) -> None:
        self.lines.append((text, signal))

    def table(self, columns: Sequence[Column[Row]], rows: Iterable[Row]) -> None:
        for row in rows:
            for column in columns:
                if signal := column.signal(row):
                    self.cells[column.header, str(column.cell(row))] = signal

    def signal_of(self, start: str) -> Signal | None:
        """Of the only line that starts with this."""
        (found,) = [signal for text, signal in self.lines if text.startswith(start)]
        return found
