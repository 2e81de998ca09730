"""One document in four formats; ages, signals and sorting."""

import dataclasses
import datetime
import io
import json

import click
import msgspec
import pytest
import rich.console
import yaml

from agent.operate.cli import output
from agent.operate.cli.commands.options import Format
from agent.operate.cli.output import Column, Screen, Signal

NOW = datetime.datetime(2026, 1, 31, 8, tzinfo=datetime.UTC)


def before(**time: float) -> datetime.datetime:
    return NOW - datetime.timedelta(**time)


class Row(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    hit_count: int
    last_seen: datetime.datetime | None = None
    netns: str = ""


ROWS = [
    Row("web", 2, before(minutes=3), "/run/netns/web"),
    Row("db", 10, before(hours=5)),
    Row("cache", 1),
]
COLUMNS: tuple[Column[Row], ...] = (
    Column("NAME", lambda row: row.name, signal=lambda row: Signal.DANGER if row.netns else None),
    Column("HITS", lambda row: row.hit_count),
    Column("LAST", lambda row: row.last_seen),
    Column("NETNS", lambda row: row.netns, is_wide=True),
)


@dataclasses.dataclass
class Printed:
    """What a screen of 80 columns prints, with colours if it is a terminal."""

    is_wide: bool = False
    is_terminal: bool = False

    def __post_init__(self) -> None:
        self.stream = io.StringIO()
        console = rich.console.Console(
            file=self.stream,
            width=80,
            force_terminal=self.is_terminal,
            color_system="standard" if self.is_terminal else None,
        )
        self.screen = Screen(is_wide=self.is_wide, console=console, now=NOW)

    @property
    def text(self) -> str:
        return self.stream.getvalue()


def test_table_has_ages() -> None:
    printed = Printed()
    printed.screen.table(COLUMNS, ROWS)
    assert printed.text.splitlines() == [
        "NAME   HITS  LAST",
        "web       2  3m ago",
        "db       10  5h ago",
        "cache     1  -",
    ]


def test_wide_table_has_times_and_further_columns() -> None:
    printed = Printed(is_wide=True)
    printed.screen.table(COLUMNS, ROWS)
    assert printed.text.splitlines()[:2] == [
        "NAME   HITS  LAST                  NETNS",
        "web       2  2026-01-31 07:57:00Z  /run/netns/web",
    ]


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_signal_is_a_colour_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, no_color: str, is_coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    printed = Printed(is_terminal=True)
    printed.screen.table(COLUMNS, ROWS)
    assert ("\x1b[31mweb" in printed.text) == is_coloured
    assert "\x1b[31mdb" not in printed.text


def test_sentence_is_wrapped_between_words() -> None:
    printed = Printed()
    printed.screen.line("word " * 20)
    assert [len(line.rstrip()) for line in printed.text.splitlines()] == [79, 19]


def test_lines_of_a_pipe_are_as_long_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(now=NOW)
    screen.line("word " * 40 + "end")
    screen.table(COLUMNS[:2], [Row("x " * 100 + "end", 1)])
    sentence, head, row = capsys.readouterr().out.splitlines()
    assert sentence == "word " * 40 + "end"
    assert head.split() == ["NAME", "HITS"]
    assert row == "x " * 100 + "end     1"


def test_cell_is_a_text_a_number_a_time_or_several_texts() -> None:
    cells: dict[str, output.Cell] = {
        **{"text": "a", "number": 0, "share": 0.5, "several": ["a", "b"], "none": None},
        **{"empty": "", "nothing": [], "time": before(seconds=30), "truth": True},
    }
    columns: list[Column[dict[str, output.Cell]]] = [
        Column(name, lambda row, name=name: row[name])  # type: ignore[misc]
        for name in cells
    ]
    printed = Printed()
    printed.screen.table(columns, [cells])
    assert printed.text.splitlines() == [
        "text  number  share  several  none  empty  nothing  time     truth",
        "a          0    0.5  a, b     -     -      -        30s ago   True",
    ]


@pytest.mark.parametrize(
    ("severity", "signal"),
    [
        ("open", Signal.DANGER),
        ("broken", Signal.DANGER),
        ("degraded", Signal.CAUTION),
        ("note", None),
    ],
)
def test_finding_has_the_signal_of_its_severity(severity: str, signal: Signal | None) -> None:
    assert output.signal_of_severity(severity) is signal


def test_mode_has_its_signal() -> None:
    modes = ("off", "audit", "enforce", "strict")
    assert [output.signal_of_mode(mode) for mode in modes] == [
        *(Signal.CAUTION, Signal.CAUTION, Signal.SAFE, Signal.SAFE)
    ]


def test_sentence_has_the_colour_of_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    printed = Printed(is_terminal=True)
    printed.screen.line("bad", Signal.DANGER)
    printed.screen.line("good")
    printed.screen.line()
    assert printed.text == "\x1b[31mbad\x1b[0m\ngood\n\n"


def test_control_characters_of_others_are_not_printed() -> None:
    printed = Printed(is_terminal=True)
    printed.screen.table(COLUMNS, [Row("a\x1b]0;x\x07", 1)])
    printed.screen.line("b\x1b[2J")
    assert r"a\x1b]0;x\x07" in printed.text
    assert r"b\x1b[2J" in printed.text


def test_brackets_are_no_markup() -> None:
    printed = Printed()
    printed.screen.table(COLUMNS, [Row("[red]x[/]", 1)])
    assert "[red]x[/]" in printed.text


def no_view(_: Screen) -> None:
    raise AssertionError("a table is printed")


def test_json_is_one_line_and_yaml_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    output.write(ROWS[0], Format.JSON, no_view)
    output.write(ROWS[0], Format.YAML, no_view)
    first, *rest = capsys.readouterr().out.splitlines()
    expected = {"name": "web", "hitCount": 2, "netns": "/run/netns/web"}
    assert json.loads(first) == expected | {"lastSeen": "2026-01-31T07:57:00Z"}
    assert yaml.safe_load("\n".join(rest)) == expected | {"lastSeen": before(minutes=3)}
    assert rest[0] == "---"


@pytest.mark.parametrize(("form", "is_wide"), [(Format.TABLE, False), (Format.WIDE, True)])
def test_view_gets_a_screen(form: Format, is_wide: bool) -> None:
    screens: list[Screen] = []
    output.write(ROWS[0], form, screens.append)
    assert [screen.is_wide for screen in screens] == [is_wide]


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("", ["web", "db", "cache"]),
        ("name", ["cache", "db", "web"]),
        ("HITS", ["db", "web", "cache"]),
        ("last", ["web", "db", "cache"]),
        ("netns", ["web", "db", "cache"]),
    ],
)
def test_rows_are_sorted_by_a_column(header: str, names: list[str]) -> None:
    assert [row.name for row in output.sort(ROWS, COLUMNS, header)] == names


def test_unknown_column_is_wrong_usage() -> None:
    with pytest.raises(click.BadParameter, match="use name, hits, last, netns"):
        output.sort(ROWS, COLUMNS, "age")
