"""The threat model's table: each cell names tests that exist, and each of them is run."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "threat-model.md"
_TABLE = re.compile(r"reads this table\. -->\n(.*?)<!-- end of the table -->", re.DOTALL)
_TEST = re.compile(r"`(test_\w+)`")
# What shows that a cell is empty of danger is in the same row, or no test can show it.
_COLUMNS = 5


def rows() -> list[list[str]]:
    """Cells of each attacker, without the head."""
    (table,) = _TABLE.findall(PAGE.read_text(encoding="utf-8"))
    lines = table.strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@functools.cache
def defined() -> dict[str, list[str]]:
    """Files of each test's name, without those that are marked to be skipped."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            marks = {ast.unparse(one) for one in node.decorator_list}
            if not any("skip" in mark or "xfail" in mark for mark in marks):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return found


def problems(table: list[list[str]]) -> list[str]:
    found = []
    for attacker, *cells in table:
        if len(cells) != _COLUMNS - 1:
            found.append(f"{attacker}: {len(cells)} cells")
        for number, cell in enumerate(cells, 1):
            names = _TEST.findall(cell)
            if not names:
                found.append(f"{attacker}, column {number}: names no test")
            found += [
                f"{name}: in {defined().get(name, [])}" for name in names if not _is_one(name)
            ]
    return found


def _is_one(name: str) -> bool:
    return len(defined().get(name, ())) == 1


def test_every_cell_of_the_table_names_tests_that_exist() -> None:
    assert problems(rows()) == []


def test_table_has_all_attackers() -> None:
    attackers = [row[0] for row in rows()]
    wanted = ("65534", "pod with", "tenant", "agent's token", "controller's token", "root of")
    assert len(attackers) == len(wanted)
    for word, attacker in zip(wanted, attackers, strict=True):
        assert word in attacker


@pytest.mark.parametrize(
    "cell", ["nothing", "`test_that_nobody_wrote`", "`test_table_has_all_attackers` `test_x`"]
)
def test_cell_without_a_test_that_exists_is_found(cell: str) -> None:
    good = "`test_table_has_all_attackers`"
    assert problems([["a", good, good, good, good]]) == []
    assert problems([["a", good, cell, good, good]])
