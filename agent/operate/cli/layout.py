"""Layout of tables as lines of text, which stay readable where the screen is narrow."""

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence

from rich.text import Text

_GAP = 2
_INDENT = "    "
# Narrower pieces are stacks of letters.
_MIN_WIDTH = 12
# Where a cell may be folded: after a space, and in words that are too long after these.
_SPACE = re.compile(r"(?<= )")
_INSIDE = re.compile(r"(?<=[ /,:=])")


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """Head of a column. is_right: numbers; is_below: on a line of its own where room is short."""

    text: str
    is_right: bool = False
    is_below: bool = False


def lines(heads: Sequence[Head], rows: Sequence[Sequence[Text]], width: int | None) -> list[Text]:
    """The table's lines, of at most `width` columns if its cells can be folded so far.

    Too wide a table first loses the columns that may be below, the last first, to lines of their
    own ("header: cell"). Then its widest columns are folded, between words and after slashes.
    """
    limit = sys.maxsize if width is None else width
    natural = [
        max([len(head.text), *(row[i].cell_len for row in rows)]) for i, head in enumerate(heads)
    ]
    beside = list(range(len(heads)))
    below: list[int] = []
    for index in reversed(range(len(heads))):
        if _total(natural, beside) <= limit:
            break
        if heads[index].is_below:
            beside.remove(index)
            below.insert(0, index)
    words = [max((_longest_word(row[i]) for row in rows), default=0) for i in range(len(heads))]
    widths = _narrowed(natural, words, heads, beside, limit)
    made = [_line([Text(heads[i].text, style="bold") for i in beside], heads, beside, widths)]
    for row in rows:
        folded = [_fold(row[i], widths[i]) for i in beside]
        for part in range(max(map(len, folded), default=0)):
            cells = [cell[part] if part < len(cell) else Text() for cell in folded]
            made.append(_line(cells, heads, beside, widths))
        for i in below:
            if row[i].plain != "-":
                made += _below(heads[i], row[i], limit)
    return made


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + _GAP * (len(shown) - 1)


def _narrowed(
    natural: Sequence[int],
    words: Sequence[int],
    heads: Sequence[Head],
    shown: Sequence[int],
    width: int,
) -> list[int]:
    """Widths after the widest columns have been made as narrow as it takes: first without cutting
    words, then with."""
    widths = list(natural)
    for least in (words, [_MIN_WIDTH] * len(heads)):
        while _total(widths, shown) > width:
            spare = {
                i: widths[i]
                for i in shown
                if not heads[i].is_right and widths[i] > max(least[i], len(heads[i].text))
            }
            if not spare:
                break
            widths[max(spare, key=spare.__getitem__)] -= 1
    return widths


def _longest_word(cell: Text) -> int:
    return max(Text(word.rstrip()).cell_len for word in _INSIDE.split(cell.plain))


def _fold(cell: Text, width: int) -> list[Text]:
    """Pieces of a cell, none wider than `width`."""
    pieces: list[Text] = []
    start = end = 0
    plain = cell.plain
    for word in _words(plain, width):
        if end > start and Text(plain[start:end] + word.rstrip()).cell_len > width:
            pieces.append(cell[start:end])
            start = end
        end += len(word)
        while Text(plain[start:end].rstrip()).cell_len > width:
            cut = min(end, start + width)
            pieces.append(cell[start:cut])
            start = cut
    pieces.append(cell[start:end])
    for piece in pieces:
        piece.rstrip()
    return pieces


def _words(text: str, width: int) -> Iterator[str]:
    for word in _SPACE.split(text):
        yield from _INSIDE.split(word) if len(word.rstrip()) > width else (word,)


def _below(head: Head, cell: Text, width: int) -> Iterator[Text]:
    label = f"{_INDENT}{head.text.lower()}: "
    for number, piece in enumerate(_fold(cell, max(_MIN_WIDTH, width - len(label)))):
        yield Text.assemble(label if number == 0 else " " * len(label), piece)


def _line(
    cells: Sequence[Text], heads: Sequence[Head], shown: Sequence[int], widths: Sequence[int]
) -> Text:
    line = Text()
    for cell, i in zip(cells, shown, strict=True):
        space = " " * (widths[i] - cell.cell_len)
        line.append_text(Text.assemble(space, cell) if heads[i].is_right else cell)
        line.append(("" if heads[i].is_right else space) + " " * _GAP)
    line.rstrip()
    return line
