"""No row of the kubelet's semantics loses its tests."""

from __future__ import annotations

import ast
import functools
import pathlib

from tests.probes import semantics

TESTS = pathlib.Path(__file__).parents[1]


@functools.cache
def names_in(file: str) -> frozenset[str]:
    room, _, name = file.rpartition("/")
    tree = ast.parse((TESTS / room / f"test_{name}.py").read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions))


def test_each_row_has_tests_and_each_exists() -> None:
    lost = []
    for table, rows in semantics.TABLES.items():
        lost += [f"{table}: {row} has no test" for row, tests in rows.items() if not tests]
        for row, test in ((row, test) for row, tests in rows.items() for test in tests):
            file, name = test.split("::")
            if f"test_{name}" not in names_in(file):
                lost.append(f"{table}: {row}: {test}")
    assert lost == []
