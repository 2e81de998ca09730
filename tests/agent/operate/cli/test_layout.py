"""Tables on narrow screens: columns move below or fold, and no cell becomes a stack of letters."""

import pytest
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


def test_columns_give_up_what_they_can_from_the_widest_on() -> None:
    heads = [Head("A"), Head("B"), Head("N", is_right=True)]
    rows = [["one two three", "one two three four", "1234567890123"]]
    assert table(45, rows, heads) == [
        "A              B                            N",
        "one two three  one two three    1234567890123",
        "               four",
    ]
    assert table(41, rows, heads) == [
        "A             B                         N",
        "one two       one two       1234567890123",
        "three         three four",
    ]
    # No word is cut as long as there is a space.
    assert table(30, rows, heads) == [
        "A       B                    N",
        "one     one two  1234567890123",
        "two     three",
        "three   four",
    ]


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (None, ["abc def/ghi jk"]),
        (14, ["abc def/ghi jk"]),
        (13, ["abc def/ghi", "jk"]),
        (12, ["abc def/ghi", "jk"]),
    ],
)
def test_cell_is_folded_where_it_has_spaces(width: int | None, expected: list[str]) -> None:
    assert table(width, [["abc def/ghi jk"]], [Head("A")]) == ["A", *expected]


def test_word_is_folded_after_its_signs_before_it_is_cut() -> None:
    word = "/var/lib/podgate/state,with=more:parts-that-are-longer-than-all"
    assert table(16, [[f"see {word}"]], [Head("A")])[1:] == [
        "see /var/lib/",
        "podgate/state,",
        "with=more:",
        "parts-that-are-l",
        "onger-than-all",
    ]


def test_lines_below_are_as_wide_as_their_screen() -> None:
    heads = [Head("A"), Head("X", is_below=True), Head("Y", is_below=True)]
    rows = [["a", "one two three four", "-"], ["b", "-", "x" * 20]]
    assert table(20, rows, heads) == [
        "A",
        "a",
        "    x: one two three",
        "       four",
        "b",
        "    y: xxxxxxxxxxxxx",
        "       xxxxxxx",
    ]
    # No narrower than a word of twelve letters.
    assert table(3, rows[1:], heads) == ["A", "b", "    y: xxxxxxxxxxxx", "       xxxxxxxx"]


def test_last_column_that_may_be_below_is_the_first_to_move() -> None:
    heads = [Head("A"), Head("X", is_below=True), Head("Y", is_below=True), Head("B")]
    rows = [["aaaa", "xxxx", "yyyy", "bbbb"]]
    assert table(22, rows, heads) == ["A     X     Y     B", "aaaa  xxxx  yyyy  bbbb"]
    assert table(21, rows, heads) == ["A     X     B", "aaaa  xxxx  bbbb", "    y: yyyy"]
    assert table(16, rows, heads) == ["A     X     B", "aaaa  xxxx  bbbb", "    y: yyyy"]
    assert table(15, rows, heads) == ["A     B", "aaaa  bbbb", "    x: xxxx", "    y: yyyy"]


def test_heads_are_bold_and_numbers_are_at_the_right() -> None:
    head, row = layout.lines(
        [Head("NUMBER", is_right=True), Head("A")], [[Text("7"), Text("x")]], None
    )
    assert (head.plain, row.plain) == ("NUMBER  A", "     7  x")
    assert {str(span.style) for span in head.spans} == {"bold"}
