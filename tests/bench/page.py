"""The page of what benches measured, made of the records: `python -m tests.bench.page`."""

import pathlib
import sys
from collections.abc import Iterable, Iterator

from tests.bench import recording
from tests.bench.figures import Figure
from tests.bench.goals import GOALS, Goal, goal_of, measured
from tests.bench.recording import Record
from tests.bench.unmet import REASONS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "internals" / "benchmarks.md"

_HEAD = """# Benchmarks

What `make bench` measured last, made from the records in tests/bench/recorded by `make docs`.
Times and CPU shares are of the machine that a table names; ratios are of one run, so they can be
compared with those of other machines. Spreads are the smallest and the largest sample.

`make bench BENCH=rest RECORD=1` records a run. `make bench BENCH=rest COMPARE=1` compares one with
its record, and fails if a ratio is worse than all that were recorded.

## Goals

| goal | at most | measured | spread | met |
|---|---|---|---|---|
"""


def render(records: Iterable[Record]) -> str:
    by_bench = {record.bench: record for record in records}
    lines = [_goal_row(goal, by_bench) for goal in GOALS]
    lines += ["", "### Why some are not met", ""]
    lines.append("\n\n".join(_reasons(by_bench)))
    for record in by_bench.values():
        lines += ["", *_section(record)]
    return _HEAD + "\n".join(lines) + "\n"


def unmet(by_bench: dict[str, Record]) -> Iterator[Goal]:
    """Goals that the recorded figures do not reach."""
    for goal in GOALS:
        if any(not goal.is_met(figure) for figure in _found(goal, by_bench)):
            yield goal


def _reasons(by_bench: dict[str, Record]) -> Iterator[str]:
    goals = list(unmet(by_bench))
    for reason in REASONS:
        if any(reason.is_about(goal.bench, goal.figure) for goal in goals):
            yield reason.text


def _found(goal: Goal, by_bench: dict[str, Record]) -> list[Figure]:
    """The recorded figure, if there is one."""
    record = by_bench.get(goal.bench)
    return [one for one in record.figures if one.figure == goal.figure] if record else []


def _goal_row(goal: Goal, by_bench: dict[str, Record]) -> str:
    found = _found(goal, by_bench)
    limit = f"at least {goal.limit:g}" if goal.is_least else f"{goal.limit:g}"
    name = f"{goal.text} (`{goal.bench}`, `{goal.figure}`)"
    if not found:
        return f"| {name} | {limit} | not recorded | | |"
    (figure,) = found
    spread = figure.ratio_spread or figure.spread
    unit = "" if figure.ratio is not None or figure.unit == "ratio" else f" {figure.unit}"
    met = "yes" if goal.is_met(figure) else "no"
    return f"| {name} | {limit}{unit} | {measured(figure):g}{unit} | {_ends(spread)} | {met} |"


def _section(record: Record) -> Iterator[str]:
    machine = record.machine
    yield f"## {record.bench}"
    yield ""
    yield (
        f"{record.date}, podgate {record.revision}; {machine.processors} processors "
        f"({machine.processor}), {machine.memory_gib} GiB, Linux {machine.kernel}, Python "
        f"{machine.python}; load {record.load:g} at the start."
    )
    yield ""
    yield "| figure | value | spread | baseline | ratio |"
    yield "|---|---|---|---|---|"
    for figure in record.figures:
        yield _row(figure)


def _row(figure: Figure) -> str:
    unit = "" if figure.unit == "ratio" else f" {figure.unit}"
    ratio = ""
    if figure.ratio is not None and figure.ratio_spread is not None:
        ratio = f"{figure.ratio:g} ({_ends(figure.ratio_spread)})"
    baseline = "" if figure.baseline is None else f"{figure.baseline:g}{unit}"
    mark = " **goal**" if goal_of(figure) else ""
    cells = f"{figure.value:g}{unit} | {_ends(figure.spread)} | {baseline} | {ratio}"
    return f"| `{figure.figure}`{mark} | {cells} |"


def _ends(spread: tuple[float, float]) -> str:
    return f"{spread[0]:g} to {spread[1]:g}"


def main() -> None:
    PAGE.write_text(render(recording.all_records()), encoding="utf-8")
    sys.stderr.write(f"{PAGE.name} written\n")


if __name__ == "__main__":
    main()
