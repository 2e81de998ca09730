"""Records which functions of podgate each test enters, in every process that the test starts.

Each interpreter imports this module when it starts with this directory in PYTHONPATH: pytest, the
agent, its relay, a command. It adds a call to each outer function of podgate's modules
when they are imported: `sys.monitoring` needs Python 3.12, and a tracer would slow down agents
until tests fail.
"""

import ast
import builtins
import contextlib
import importlib.machinery
import os
import pathlib
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

_ROOT = pathlib.Path(__file__).parents[3]
_PACKAGES = ("agent", "bpf", "probes")
# The name that modules are given; without underscores at its end it would be mangled.
ENTERED = "__podgate_entered__"


class Recorder:
    """Writes a line for the first entry of each function in each process and test."""

    def __init__(self, path: str, variable: str) -> None:
        """variable: the one of the environment that names the test."""
        self._path = path
        self._variable = variable
        self._known: set[tuple[str, str]] = set()

    def entered(self, function: str) -> None:
        """function: with its module, as in "agent/gates/ports.py:Ports.add"."""
        entry = (os.environ.get(self._variable, ""), function)
        if entry not in self._known:
            self._known.add(entry)
            # Without a descriptor that stays, which tests would find. What may not write, or has no
            # descriptor left, is not recorded.
            with contextlib.suppress(OSError):
                output = os.open(self._path, os.O_WRONLY | os.O_APPEND)
                os.write(output, "\t".join(entry).encode() + b"\n")
                os.close(output)


class Entries(ast.NodeTransformer):
    """Adds the call to functions and methods."""

    def __init__(self, path: str) -> None:
        self._prefix = f"{path}:"

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before = self._prefix
        self._prefix += f"{node.name}."
        self.generic_visit(node)
        self._prefix = before
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._add(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._add(node)

    def _add(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        name = ast.Constant(self._prefix + node.name)
        call = ast.Expr(ast.Call(ast.Name(ENTERED, ast.Load()), [name], []))
        node.body.insert(int(ast.get_docstring(node, clean=False) is not None), call)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles podgate's modules with the calls. Their bytecode is kept: the tree is a copy for the
    record alone."""

    def source_to_code(  # type: ignore[override]
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> CodeType:
        tree = Entries(path.removeprefix(f"{_ROOT}/")).visit(ast.parse(data, path))
        code: CodeType = compile(
            ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize
        )
        return code


class _Finder:
    """Finds podgate's modules for `_Loader`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _start() -> None:
    # Of tests.mutants.recording, which this must not import; without it a test has imported this.
    path = os.environ.get("PODGATE_MUTANTS_ENTRIES")
    if path is None:
        return
    recorder = Recorder(path, "PODGATE_MUTANTS_CONTEXT")
    setattr(builtins, ENTERED, recorder.entered)
    finder: Any = _Finder
    sys.meta_path.insert(0, finder)


_start()
