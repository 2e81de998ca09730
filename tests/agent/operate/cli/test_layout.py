"""Tables on narrow screens: columns move below or fold, and no cell becomes a stack of letters."""

from rich.text import Text

from agent.operate.cli import layout
from agent.operate.cli.layout import Head

HEADS = [Head("POD"), Head("SOURCE", is_below=True), Head("PACKETS", is_right=True)]
ROWS = [
    ["default/web", "/system.slice/curl.service", "12"],
    ["shop/db", "-", "3"],
]


def table(width: int | None, rows: list[list[str]] = ROWS, heads: list[Head] = HEADS) -> list[str]:
    cells = [[Text(cell) for cell in row] for row in rows]
    return [line.plain for line in layout.lines(heads, cells, width)]


def test_table_that_fits_has_one_line_for_each_row() -> None:
    expected = [
        "POD          SOURCE                      PACKETS",
        "default/web  /system.slice/curl.service       12",
        "shop/db      -                                 3",
    ]
    assert table(48) == expected
    assert table(None) == expected


def test_column_moves_below_where_the_screen_is_narrow() -> None:
    assert table(47) == [
        "POD          PACKETS",
        "default/web       12",
        "    source: /system.slice/curl.service",
        "shop/db            3",
    ]


def test_line_below_is_folded_after_a_slash() -> None:
    assert table(30)[2:4] == [
        "    source: /system.slice/",
        "            curl.service",
    ]


def test_widest_column_is_folded_between_words() -> None:
    heads = [Head("A"), Head("B")]
    assert table(20, [["short", "one two three four"]], heads) == [
        "A      B",
        "short  one two three",
        "       four",
    ]


def test_word_longer_than_its_column_is_cut() -> None:
    assert table(16, [["x" * 30, "y"]], [Head("A"), Head("B")]) == [
        "A              B",
        "xxxxxxxxxxxxx  y",
        "xxxxxxxxxxxxx",
        "xxxx",
    ]


def test_columns_are_never_narrower_than_a_word() -> None:
    (_, first, *_) = table(10, [["a" * 20, "b" * 20]], [Head("A"), Head("B")])
    assert first == f"{'a' * 12}  {'b' * 12}"


def test_wide_characters_are_measured_in_columns() -> None:
    assert table(None, [["日本", "x"]], [Head("A"), Head("B")]) == ["A     B", "日本  x"]


def test_table_without_rows_has_its_head() -> None:
    assert table(80, []) == ["POD  SOURCE  PACKETS"]
