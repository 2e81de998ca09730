"""Records which functions of podgate handle one thing, such as a pod (`tests.tracing.trace`).

Each interpreter imports this module when it starts with this directory in PYTHONPATH: the agent,
its relay, a command. What is followed can be changed at any time, by one write for all of them.

A function handles the thing if a pattern is in the `repr` of its arguments or of its result. That
leaves out the loops that would run anyway. The calls that check it are added to podgate's modules
when they are imported: `sys.monitoring` needs Python 3.12, and `sys.setprofile` of 3.11, which
copies the local variables of each frame to and fro, crashed one agent of ten.
"""

import ast
import builtins
import hashlib
import importlib.machinery
import json
import marshal
import mmap
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", ast.FunctionDef, ast.AsyncFunctionDef)

_ROOT = pathlib.Path(__file__).parents[3]
_PACKAGES = ("agent", "bpf", "probes")
# Of the modules with the calls.
_CODE = pathlib.Path(os.environ["PODGATE_TEST_TRACED_CODE"])
# Names that the modules are given; without underscores at their ends they would be mangled.
_CALLED, _RETURNED = "__podgate_called__", "__podgate_returned__"
# Here an event loop calls what was handed over to it.
_LOOP = ("asyncio/events.py", "_run")


class Recorder:
    """Writes one line of JSON for each call and each return that handles the thing."""

    def __init__(self, directory: pathlib.Path) -> None:
        with (directory / "pattern").open("rb") as file:
            self._shared = mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._output = os.open(
            directory / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        self._content = bytes(mmap.PAGESIZE)
        self._pattern: re.Pattern[str] | None = None

    def called(self, *arguments: object) -> None:
        """The first statement of each function."""
        self._check(arguments)

    def returned(self, value: T) -> T:
        """Around the value of each return statement."""
        self._check((value,))
        return value

    def _check(self, values: Sequence[object]) -> None:
        content = self._shared[:]
        if content != self._content:
            self._content = content
            text = content.rstrip(b"\0").decode()
            self._pattern = re.compile(text, re.DOTALL) if text else None
        if self._pattern and self._pattern.search(" ".join(map(_text, values))):
            line = {"at": time.monotonic_ns(), "stack": _stack(sys._getframe(2))}
            os.write(self._output, json.dumps(line).encode() + b"\n")


def _text(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # it is not complete yet
        return ""


class _Thread(threading.local):
    """submitters: the frames that handed the current call to this thread of a pool."""

    submitters: tuple[tuple[str, str], ...] = ()


_thread = _Thread()


def _stack(frame: FrameType | None) -> tuple[tuple[str, str], ...]:
    """File and function of podgate's frames, this one first, to where its task begins."""
    found = []
    while frame is not None:
        code = frame.f_code
        path = code.co_filename.removeprefix(f"{_ROOT}/")
        if path.startswith(_PACKAGES):
            found.append((path, code.co_qualname))
        elif path.endswith(_LOOP[0]) and code.co_name == _LOOP[1]:
            break
        frame = frame.f_back
    return (*found, *_thread.submitters)


def _follow_threads() -> None:
    submit = ThreadPoolExecutor.submit

    def submit_with_stack(
        pool: ThreadPoolExecutor, call: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> Future[T]:
        submitters = _stack(sys._getframe(1))

        def run() -> T:
            _thread.submitters = submitters
            return call(*args, **kwargs)

        return submit(pool, run)

    ThreadPoolExecutor.submit = submit_with_stack  # type: ignore[assignment,method-assign]


class _Calls(ast.NodeTransformer):
    """Adds the calls to each function."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._add(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._add(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None:
            node.value = _call(_RETURNED, node.value)
        return node

    def _add(self, node: F) -> F:
        self.generic_visit(node)
        args: ast.arguments = node.args
        found = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
        names = [ast.Name(one.arg, ast.Load()) for one in found if one]
        has_docstring = ast.get_docstring(node, clean=False) is not None
        node.body.insert(int(has_docstring), ast.Expr(_call(_CALLED, *names)))
        return node


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles podgate's modules with the calls. The code is kept for other interpreters of the
    run, apart from the bytecode of the modules as they are."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        kept = _CODE / hashlib.sha256(source + path.encode()).hexdigest()
        try:
            code: CodeType = marshal.loads(kept.read_bytes())
        except FileNotFoundError:
            tree = _Calls().visit(ast.parse(source, path))
            code = compile(ast.fix_missing_locations(tree), path, "exec")
            made = kept.with_suffix(f".{os.getpid()}")
            made.write_bytes(marshal.dumps(code))
            made.rename(kept)
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
    recorder = Recorder(pathlib.Path(os.environ["PODGATE_TEST_TRACE"]))
    setattr(builtins, _CALLED, recorder.called)
    setattr(builtins, _RETURNED, recorder.returned)
    finder: Any = _Finder
    sys.meta_path.insert(0, finder)
    _follow_threads()


_start()
