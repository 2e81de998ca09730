"""No row of the kubelet's semantics loses its tests."""

from __future__ import annotations

import ast
import functools
import pathlib

import pytest

from tests.probes import semantics

TESTS = pathlib.Path(__file__).parents[1]


@functools.cache
def names_in(file: str) -> frozenset[str]:
    room, _, name = file.rpartition("/")
    tree = ast.parse((TESTS / room / f"test_{name}.py").read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions))


ROWS = [
    pytest.param(tests, id=f"{table}: {row}")
    for table, rows in semantics.TABLES.items()
    for row, tests in rows.items()
]


@pytest.mark.parametrize("tests", ROWS)
def test_each_row_has_tests_and_each_exists(tests: list[str]) -> None:
    assert tests
    for test in tests:
        file, name = test.split("::")
        assert f"test_{name}" in names_in(file), test
