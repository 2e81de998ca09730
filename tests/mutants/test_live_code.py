"""New code of loaded functions behaves as the changed module does."""

import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from tests.mutants import live_code

SOURCE = """\
import contextlib
import functools
from dataclasses import dataclass

LIMIT = 8


def at_import():
    return 1


AT_IMPORT = at_import()


@dataclass(slots=True)
class Pod:
    size: int = 2

    def method(self):
        return self.size + 3

    @property
    def shown(self):
        return self.size + 4

    @staticmethod
    def static():
        return 5

    @classmethod
    def of_class(cls):
        return 6

    async def settle(self):
        return 7


class Node:
    @functools.cached_property
    def cached(self):
        return 11

    def of_parent(self):
        return super().__hash__()


@contextlib.contextmanager
def opened():
    yield 12


@functools.lru_cache
def remembered():
    return 13


def outer():
    def inner():
        return 14

    return inner()


TABLE = {"a": lambda: 15, "b": lambda: 16}


def free(count):
    def inner():
        return count + 17

    return inner
"""


@pytest.fixture
def load(tmp_path: pathlib.Path) -> Iterator[Callable[[str], ModuleType]]:
    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    before = set(sys.modules)
    yield loaded
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def live(
    tmp_path: pathlib.Path, load: Callable[[str], ModuleType]
) -> tuple[live_code.LiveCode, ModuleType]:
    """Of the loaded module "pods"."""
    (tmp_path / "pods.py").write_text(SOURCE)
    made = live_code.LiveCode(str(tmp_path))
    made.watch()
    try:
        module = load("pods")
    finally:
        made.index()
    return made, module


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("self.size + 3", "self.size - 3", lambda pods: pods.Pod().method()),
        ("self.size + 4", "self.size - 4", lambda pods: pods.Pod().shown),
        ("return 5", "return -5", lambda pods: pods.Pod.static()),
        ("return 6", "return -6", lambda pods: pods.Pod.of_class()),
        ("return 11", "return -11", lambda pods: pods.Node().cached),
        ("yield 12", "yield -12", lambda pods: pods.opened().__enter__()),
        ("return 13", "return -13", lambda pods: pods.remembered()),
        ("return 14", "return -14", lambda pods: pods.outer()),
        ("lambda: 16", "lambda: -16", lambda pods: pods.TABLE["b"]()),
        ("count + 17", "count - 17", lambda pods: pods.free(1)()),
        # More lines, so all that follows has others.
        ("return 5", "a = 1\n        return a - 6", lambda pods: pods.Pod.static()),
    ],
)
def test_function_changes_where_it_is_used(
    live: tuple[live_code.LiveCode, ModuleType],
    old: str,
    new: str,
    value: Callable[[ModuleType], int],
) -> None:
    code, module = live
    ((function, changed),) = code.replacements("pods.py", SOURCE, SOURCE.replace(old, new))
    function.__code__ = changed
    assert value(module) < 0


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("LIMIT = 8", "LIMIT = 9", "outside of functions"),
        ("size: int = 2", "size: int = 3", "outside of functions"),
        ("return 1\n", "return 2\n", "has run before"),
        ("super().__hash__()", "18", "outside of functions"),
        ("return 7", "yield 7", "another kind"),
        ("return 7", "return 7 is 7", "does not compile"),
    ],
)
def test_other_changes_need_a_new_process(
    live: tuple[live_code.LiveCode, ModuleType], old: str, new: str, reason: str
) -> None:
    with pytest.raises(live_code.CannotReplaceError, match=reason):
        live[0].replacements("pods.py", SOURCE, SOURCE.replace(old, new))


def test_function_that_exists_no_more_needs_a_new_process(
    live: tuple[live_code.LiveCode, ModuleType],
) -> None:
    """It may be in a decorator that did not keep it."""
    source = SOURCE.replace("return 13", "return 131")
    with pytest.raises(live_code.CannotReplaceError, match="no function"):
        live[0].replacements("pods.py", source, source.replace("131", "132"))


def test_module_that_is_not_imported_needs_no_replacement(
    live: tuple[live_code.LiveCode, ModuleType],
) -> None:
    assert live[0].replacements("nodes.py", SOURCE, SOURCE.replace("8", "9")) == []


def test_change_of_type_alone_is_a_change() -> None:
    before, after = (compile(f"def f(): return {one}", "a.py", "exec") for one in ("1", "True"))
    assert len(list(live_code.changed_functions(before, after))) == 1
