"""The functions of podgate that a process has loaded, and the code that a mutant gives them.

A function gets the code of the changed source in place, wherever it is referred to: as a method, in
a property, below a decorator, in a table. That is the same as to import the changed module if the
mutant is in functions only, and none of them has run yet.
"""

import gc
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import TypeAlias

Replacement: TypeAlias = tuple[FunctionType, CodeType]
"""A function, and its new code."""

_Place: TypeAlias = tuple[str, str, int]
"""File, qualified name and line; two lambdas may have the same."""

_OPTIMIZED = 1  # CO_OPTIMIZED: of functions, not of modules and classes
_CONTENT = (
    *("co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_code"),
    *("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable"),
)


class CannotReplaceError(Exception):
    """A mutant has an effect that new code of functions does not have."""


class LiveCode:
    """What this process runs from `watch` to `index`, and the functions that it has then."""

    def __init__(self, root: str) -> None:
        """root: the directory of the code."""
        self._root = f"{root}/"
        # By identity: the hash of code takes long.
        self._entered: dict[int, CodeType] = {}
        self._run: defaultdict[_Place, list[CodeType]] = defaultdict(list)
        self._functions: defaultdict[_Place, list[FunctionType]] = defaultdict(list)
        self._files: set[str] = set()

    def watch(self) -> None:
        """Note from now on which code this thread runs."""
        sys.setprofile(self._note)

    def index(self) -> None:
        """Find all functions, but not below `gc.freeze`. No more is noted."""
        sys.setprofile(None)
        for code in self._entered.values():
            if code.co_filename.startswith(self._root):
                self._run[_place(code)].append(code)
                self._files.add(code.co_filename)
        self._entered.clear()
        for found in gc.get_objects():
            if type(found) is FunctionType and found.__code__.co_filename.startswith(self._root):
                self._functions[_place(found.__code__)].append(found)

    def replacements(self, path: str, source: str, changed: str) -> list[Replacement]:
        """What a mutant replaces; nothing if its module is not imported yet.

        path: of the module, below the root. Raises `CannotReplaceError`.
        """
        name = self._root + path
        if name not in self._files:
            return []
        try:
            with warnings.catch_warnings():
                # A test that imports the module may fail because of one.
                warnings.simplefilter("error")
                before, after = (
                    compile(text, name, "exec", dont_inherit=True) for text in (source, changed)
                )
        except (SyntaxError, ValueError, Warning) as error:
            raise CannotReplaceError("it does not compile without warnings") from error
        return [
            (function, new)
            for old, new in changed_functions(before, after)
            for function in self._matching(old, new)
        ]

    def _matching(self, old: CodeType, new: CodeType) -> list[FunctionType]:
        if any(_content(one) == _content(old) for one in self._run[_place(old)]):
            raise CannotReplaceError("its function has run before the tests")
        if (old.co_freevars, old.co_flags) != (new.co_freevars, new.co_flags):
            raise CannotReplaceError("its function becomes one of another kind")
        content = _content(old)
        found = [one for one in self._functions[_place(old)] if _content(one.__code__) == content]
        if not found:
            raise CannotReplaceError("no function has its code")
        return found

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._entered.setdefault(id(frame.f_code), frame.f_code)


def changed_functions(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The outermost functions of a module that differ, before and after; lines may be others.

    Raises `CannotReplaceError` if the module or a class differs outside of functions.
    """
    if _content(before) == _content(after):
        return
    if before.co_flags & _OPTIMIZED:
        yield before, after
        return
    if _content(before, is_inner=False) != _content(after, is_inner=False):
        raise CannotReplaceError("it is outside of functions")
    for old, new in zip(_inner(before), _inner(after), strict=True):
        yield from changed_functions(old, new)


def _place(code: CodeType) -> _Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _content(code: CodeType, *, is_inner: bool = True) -> tuple[object, ...]:
    """What code does, whatever lines it has. is_inner: with the functions and classes in it."""
    constants = [
        _content(one) if is_inner and isinstance(one, CodeType) else _constant(one)
        for one in code.co_consts
    ]
    return *(getattr(code, name) for name in _CONTENT), *constants


def _constant(value: object) -> object:
    """Differs for constants that are equal but of different types: 1, 1.0 and True."""
    if isinstance(value, CodeType):
        return CodeType
    if isinstance(value, tuple):
        return tuple(_constant(one) for one in value)
    if isinstance(value, frozenset):
        return frozenset(_constant(one) for one in value)
    return type(value), repr(value)
