"""The threat model's table, and that of attacks on podgate's own programs: each cell names tests
that exist, and each of them is run."""

import ast
import functools
import pathlib
import re

import pytest

from tests import unprivileged
from tests.docs.blocks import PAGES

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "threat-model.md"
FOUND = ROOT / "docs" / "internals" / "control-plane.md"
_TABLE = re.compile(r"reads this table\. -->\n(.*?)<!-- end of the table -->", re.DOTALL)
_TEST = re.compile(r"`(test_\w+)`")
_NOT_RUN = ("skip", "xfail")
# What shows that a cell is empty of danger is in the same row, or no test can show it.
_COLUMNS = 5
_NUMBERS = [f"C{number}" for number in range(1, 26)]
_MOUNT = re.compile(r"mountPath: /run/podgate/(?:podinfo|localnet)\b.*")


def rows(page: pathlib.Path = PAGE) -> list[list[str]]:
    """Cells of each line, without the head."""
    (table,) = _TABLE.findall(page.read_text(encoding="utf-8"))
    lines = table.strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@functools.cache
def defined(name: str) -> list[str]:
    """The source of each test of this name, without those that are marked to be skipped."""
    return [
        ast.unparse(node)
        for path, text in _texts().items()
        if f"def {name}(" in text
        for node in _parsed(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        if not any(mark in ast.unparse(one) for one in node.decorator_list for mark in _NOT_RUN)
    ]


@functools.cache
def _texts() -> dict[pathlib.Path, str]:
    return {path: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}


@functools.cache
def _parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(_texts()[path])


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
                f"{name}: {len(defined(name))} of them" for name in names if not _is_one(name)
            ]
    return found


def _is_one(name: str) -> bool:
    return len(defined(name)) == 1


def test_every_cell_of_the_table_names_tests_that_exist() -> None:
    assert problems(rows()) == []


def test_table_has_all_attackers() -> None:
    attackers = [row[0] for row in rows()]
    wanted = ("65534", "pod with", "tenant", "agent's token", "controller's token", "root of")
    assert len(attackers) == len(wanted)
    for word, attacker in zip(wanted, attackers, strict=True):
        assert word in attacker


def test_all_that_a_review_found_has_tests() -> None:
    table = rows(FOUND)
    assert [row[0] for row in table] == ["C1", "C1b", *_NUMBERS[1:]]
    for number, _, _, cell in table:
        names = _TEST.findall(cell)
        assert names, number
        assert [name for name in names if not _is_one(name)] == [], number


def test_what_a_user_without_rights_did_is_tried_as_that_user() -> None:
    """One of the tests of each line becomes the user, by `tests.unprivileged`."""
    tried = [row for row in rows(FOUND) if f"user {unprivileged.USER}" in row[1]]
    assert len(tried) > 10
    for number, _, _, cell in tried:
        sources = [source for name in _TEST.findall(cell) for source in defined(name)]
        assert any("unprivileged.running" in source for source in sources), number


def test_pages_mount_directories_of_sockets_read_only() -> None:
    """Root of a container could replace a socket otherwise."""
    mounts = [
        (page.name, line)
        for page in PAGES
        for line in _MOUNT.findall(page.read_text(encoding="utf-8"))
    ]
    assert mounts
    assert [mount for mount in mounts if "readOnly: true" not in mount[1]] == []


@pytest.mark.parametrize(
    "cell", ["nothing", "`test_that_nobody_wrote`", "`test_table_has_all_attackers` `test_x`"]
)
def test_cell_without_a_test_that_exists_is_found(cell: str) -> None:
    good = "`test_table_has_all_attackers`"
    assert problems([["a", good, good, good, good]]) == []
    assert problems([["a", good, cell, good, good]])
