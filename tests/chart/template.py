"""Renderer of parsed templates, with the functions of Go, sprig and Helm that the chart uses.

Stricter than Helm, so that a typing error in a template fails a test: a value that does not exist
is an error.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from tests.chart import syntax
from tests.chart.syntax import Assignment, Branch, Loop, Nodes, Output, Pipeline, TemplateError

Json = dict[str, Any]
# Go prints larger floats, which all numbers in values are, with an exponent.
_LARGEST_NUMBER = 999_999


class Templates:
    """Templates that may include each other's named ones."""

    def __init__(self) -> None:
        self._files: dict[str, Nodes] = {}
        self._named: dict[str, Nodes] = {}

    def add(self, file: str, text: str) -> None:
        nodes, defined = syntax.parse(text, file)
        self._files[file] = nodes
        self._named |= defined

    def render(self, file: str, root: Mapping[str, object]) -> str:
        """One file. root: dot, such as Values and Release. Raises `TemplateError`."""
        try:
            return self._frame(root).render(self._files[file])
        except TemplateError as error:
            raise TemplateError(f"{file}: {error}") from error

    def _frame(self, dot: object) -> "_Frame":
        return _Frame(dot, {"$": dot}, self._include)

    def _include(self, name: str, dot: object) -> str:
        if name not in self._named:
            raise TemplateError(f"no template is named {name}")
        return self._frame(dot).render(self._named[name])


class _Frame:
    """One template's dot and variables."""

    def __init__(
        self, dot: object, variables: dict[str, object], include: Callable[[str, object], str]
    ) -> None:
        self._dot = dot
        self._variables = variables
        self._include = include

    def render(self, nodes: Nodes) -> str:
        return "".join(self._pieces(nodes))

    def _pieces(self, nodes: Nodes) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, Output):
                value = node.value
                yield value if isinstance(value, str) else _text(self._value(value))
            elif isinstance(node, Assignment):
                self._variables[node.variable] = self._value(node.value)
            elif isinstance(node, Branch):
                yield self._branch(node)
            else:
                yield from self._loop(node)

    def _branch(self, node: Branch) -> str:
        value = self._value(node.condition)
        if not value:
            return self._inner(self._dot).render(node.otherwise)
        return self._inner(value if node.sets_dot else self._dot).render(node.body)

    def _loop(self, node: Loop) -> Iterator[str]:
        items = self._value(node.items)
        pairs = sorted(items.items()) if isinstance(items, dict) else enumerate(_list(items))
        for key, value in pairs:
            inner = self._inner(value)
            given = (key, value)[-len(node.variables) :] if node.variables else ()
            inner._variables |= dict(zip(node.variables, given, strict=True))
            yield inner.render(node.body)

    def _inner(self, dot: object) -> "_Frame":
        # A block's declarations end with it.
        return _Frame(dot, dict(self._variables), self._include)

    def _value(self, pipeline: Pipeline) -> Any:
        value: tuple[Any, ...] = ()
        for first, *operands in pipeline.commands:
            arguments = [self._operand(one) for one in operands]
            value = (self._call(first, [*arguments, *value]),)
        return value[0]

    def _call(self, first: syntax.Operand, arguments: list[Any]) -> Any:
        if isinstance(first, syntax.Function):
            if first.name == "include":
                return self._include(*arguments)
            if first.name not in _FUNCTIONS:
                raise TemplateError(f"the function {first.name} is not supported")
            return _FUNCTIONS[first.name](*arguments)
        value = self._operand(first)
        if callable(value):
            return value(*arguments)
        if arguments:
            raise TemplateError(f"{first} is not a function")
        return value

    def _operand(self, operand: syntax.Operand) -> Any:
        if isinstance(operand, syntax.Literal):
            return operand.value
        if isinstance(operand, Pipeline):
            return self._value(operand)
        if isinstance(operand, syntax.Function):
            return self._call(operand, [])
        if operand.base == ".":
            value = self._dot
        elif operand.base in self._variables:
            value = self._variables[operand.base]
        else:
            raise TemplateError(f"{operand.base} is not declared")
        for name in operand.path:
            if not isinstance(value, Mapping) or name not in value:
                raise TemplateError(f"{operand.base} has no {'.'.join(operand.path)}")
            value = value[name]
        return value


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) <= _LARGEST_NUMBER:
        return str(value)
    if isinstance(value, str):
        return value
    raise TemplateError(f"{value!r} is printed without toYaml or toJson")


def _list(value: object) -> list[object]:
    if value is None or isinstance(value, list):
        return value or []
    raise TemplateError(f"{value!r} is no list")


def _to_yaml(value: object) -> str:
    return yaml.safe_dump(value, width=10_000, allow_unicode=True).removesuffix("...\n").strip("\n")


def _indent(width: int, text: str) -> str:
    """Empty lines, too, as sprig."""
    return "\n".join(" " * width + line for line in text.split("\n"))


def _equal(one: object, *others: object) -> bool:
    """Go compares neither numbers of values, which are floats, with its own, nor other types."""
    if isinstance(one, int) and not isinstance(one, bool):
        raise TemplateError("eq of numbers is not supported")
    return any(one == other and type(one) is type(other) for other in others)


def _print(form: str, *values: object) -> str:
    if set(re.findall(r"%(.)", form)) - {"s"}:
        raise TemplateError(f"{form!r} is not supported")
    return form % tuple(map(_text, values))


def _first(condition: Callable[[object], bool], values: tuple[Any, ...]) -> Any:
    return next((one for one in values if condition(one)), values[-1])


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    # Go
    "and": lambda *values: _first(lambda one: not one, values),
    "or": lambda *values: _first(bool, values),
    "not": lambda value: not value,
    "eq": _equal,
    "ne": lambda one, other: not _equal(one, other),
    "printf": _print,
    # sprig
    "default": lambda alternative, value: value or alternative,
    "quote": lambda value: json.dumps(_text(value), ensure_ascii=False),
    "indent": _indent,
    "nindent": lambda width, text: "\n" + _indent(width, text),
    "replace": lambda old, new, text: text.replace(old, new),
    "dir": lambda path: path.rpartition("/")[0] or "/",
    "base": lambda path: path.rpartition("/")[2],
    "dict": lambda *values: dict(zip(values[::2], values[1::2], strict=True)),
    # Helm
    "toYaml": _to_yaml,
    "toJson": lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False),
}
