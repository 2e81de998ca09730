"""The mutants of a module: cosmic-ray's operators, two more, and what is not worth a mutant."""

import itertools
import pathlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import parso.python.tree
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.binary_operator_replacement import operators as binary_operators
from cosmic_ray.operators.boolean_replacer import (
    AddNot,
    ReplaceAndWithOr,
    ReplaceFalseWithTrue,
    ReplaceOrWithAnd,
    ReplaceTrueWithFalse,
)
from cosmic_ray.operators.break_continue import ReplaceBreakWithContinue, ReplaceContinueWithBreak
from cosmic_ray.operators.comparison_operator_replacement import operators as comparison_operators
from cosmic_ray.operators.exception_replacer import ExceptionReplacer
from cosmic_ray.operators.number_replacer import NumberReplacer
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.unary_operator_replacement import operators as unary_operators
from cosmic_ray.operators.zero_iteration_for_loop import ZeroIterationForLoop

Node: TypeAlias = Any
"""A node or a leaf of parso's tree."""
Position: TypeAlias = tuple[int, int]

# One or two of the replacements of each operator: the next in meaning, not those that fail in
# whatever runs them.
_REPLACEMENTS = (
    *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
    *("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "LtE_Gt", "Gt_LtE", "GtE_Lt"),
    *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul"),
    *("BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitOr", "LShift_RShift", "RShift_LShift"),
    *("Delete_Not", "Delete_USub", "Delete_Invert"),
)
"""The end of the names of cosmic-ray's classes."""


class RemoveCall(Operator):  # type: ignore[misc]
    """Removes a statement that is only a call."""

    def mutation_positions(self, node: Node) -> Iterator[tuple[Position, Position]]:
        if node.type == "simple_stmt" and _is_call(node.children[0]):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        call = node.children[0]
        first = call.get_first_leaf()
        node.children[0] = parso.python.tree.Name("pass", first.start_pos, first.prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class NegateMembership(Operator):  # type: ignore[misc]
    """Replaces `in` by `not in`, and `not in` by `in`."""

    def mutation_positions(self, node: Node) -> Iterator[tuple[Position, Position]]:
        if node.type == "comparison":
            for operator in node.children[1::2]:
                if _text(operator) in _NEGATED:
                    yield operator.start_pos, operator.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        places = [
            place
            for place in range(1, len(node.children), 2)
            if _text(node.children[place]) in _NEGATED
        ]
        operator = node.children[places[index]]
        node.children[places[index]] = parso.python.tree.Name(
            _NEGATED[_text(operator)], operator.start_pos, " "
        )
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


_NEGATED = {"in": "not in", "not in": "in"}
_OPERATORS: tuple[Operator, ...] = (
    *(
        operator()
        for family in (binary_operators(), comparison_operators(), unary_operators())
        for operator in family
        if operator.__name__.endswith(tuple(f"_{name}" for name in _REPLACEMENTS))
    ),
    *(
        operator()
        for operator in (
            AddNot,
            ReplaceAndWithOr,
            ReplaceOrWithAnd,
            ReplaceTrueWithFalse,
            ReplaceFalseWithTrue,
            ReplaceBreakWithContinue,
            ReplaceContinueWithBreak,
            ExceptionReplacer,
            NumberReplacer,
            ZeroIterationForLoop,
            RemoveCall,
            NegateMembership,
        )
    ),
)


class MutationError(Exception):
    """A mutant does not fit the module."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module, by an operator."""

    path: str
    lines: range
    """Of the statement that changes."""
    function: range
    """The lines of the outermost function that has the statement, without its head."""
    name: str
    """Of that function, such as "Ports.add"; empty for a lambda outside of functions."""
    operator: int
    occurrence: int

    def apply(self, source: str) -> str:
        changed = mutate_code(source, _OPERATORS[self.operator], self.occurrence)
        assert isinstance(changed, str)
        return changed


def of_module(root: pathlib.Path, path: str) -> Iterator[Mutant]:
    """All mutants of a module that tests should detect."""
    tree = get_ast((root / path).read_text())
    for number, operator in enumerate(_OPERATORS):
        occurrence = 0
        for node in ast_nodes(tree):
            for start, _ in operator.mutation_positions(node):
                leaf = tree.get_leaf_for_position(start, include_prefixes=True)
                if not _is_noise(leaf, operator) and not _is_twin(leaf, operator):
                    yield Mutant(
                        path, _statement(leaf), _body(leaf), _name(leaf), number, occurrence
                    )
                occurrence += 1


def sample(root: pathlib.Path, mutants: list[Mutant], size: int | None, seed: int) -> list[Mutant]:
    """`size` of them, or all, in an order of the seed; a larger sample begins with the same.

    Without those that do not compile: any test detects them.
    """
    shuffled = list(mutants)
    random.Random(seed).shuffle(shuffled)
    valid = (mutant for mutant in shuffled if _compiles(mutant, (root / mutant.path).read_text()))
    return list(itertools.islice(valid, size))


def _compiles(mutant: Mutant, source: str) -> bool:
    try:
        compile(mutant.apply(source), mutant.path, "exec")
    except (SyntaxError, AttributeError):  # cosmic-ray fails at dotted names of exceptions
        return False
    return True


_LOGS = ("log.", "_log.", "self._log.", "_log_failure(")
# Whether zip() compares lengths, and how a thread ends, has no effect that a test could observe.
_BOUNDARIES = ("_Lt_LtE", "_LtE_Lt", "_Gt_GtE", "_GtE_Gt")
_TIMES = re.compile(r"_SECONDS|_seconds|\b_?now\b|\btime\(\)|deadline|_(until|at|ns|due)\b")
# Between units, of which one more or less in a million shows nowhere.
_UNIT = re.compile(r"\d+e\d+")
_OWN_LIMITS = re.compile(r"\b_[A-Z][A-Z0-9_]+\b")
_QUIET_KEYWORDS = frozenset({"strict", "daemon"})
# How long a pause is; that there is one stays a mutant.
_PAUSES = ("sleep", "_sleep")


def _is_noise(leaf: Node, operator: Operator) -> bool:
    """Whether a change here has no effect on behaviour, or none that a test should fix.

    That is what runs at import (declarations, defaults, type aliases and constants: a constant's
    exact value is a choice), annotations, decorators, asserts (they document), log lines, `repr`,
    numbers that a name or attribute begins with, factors between units ("1e9"), digits of rounding,
    where parameters by keyword begin, time limits and pauses, the
    very moment of one, and whether a limit that a module sets itself is the last value or beyond.
    """
    if leaf.parent.type == "parameters":  # the bare "*"
        return True
    if isinstance(operator, NumberReplacer) and _UNIT.fullmatch(_text(leaf)):
        return True
    if type(operator).__name__.endswith(_BOUNDARIES):
        comparison = _text(leaf.parent)
        if _TIMES.search(comparison) or _OWN_LIMITS.search(comparison):
            return True
    is_in_function = False
    inner = leaf
    while node := inner.parent:
        if node.type in ("decorator", "assert_stmt"):
            return True
        if node.type == "tfpdef" or (node.type == "annassign" and inner is node.children[1]):
            return True
        if node.type == "funcdef":
            if node.name.value == "__repr__" or inner is node.annotation:
                return True
            is_in_function |= inner.type in ("suite", "simple_stmt")
        if node.type == "lambdef":
            is_in_function = True
        if node.type == "simple_stmt" and _text(node).startswith(_LOGS):
            return True
        is_rounding = node.type == "atom_expr" and _text(node).startswith("round(")
        is_pause = node.type == "trailer" and _text(node.get_previous_leaf()) in _PAUSES
        is_whole = inner is leaf or inner.type == "testlist_star_expr"
        is_initial = node.type in ("expr_stmt", "annassign") and is_whole
        if isinstance(operator, NumberReplacer) and (is_initial or is_rounding or is_pause):
            return True
        if node.type == "argument":
            keyword = _text(node.children[0])
            if keyword in _QUIET_KEYWORDS:
                return True
            if isinstance(operator, NumberReplacer) and _is_duration(keyword):
                return True
        inner = node
    return not is_in_function


def _is_twin(leaf: Node, operator: Operator) -> bool:
    """Whether the negation of a condition is the mutant of another operator, too."""
    if not isinstance(operator, AddNot):
        return False
    condition = leaf
    while condition.parent.type not in ("if_stmt", "while_stmt", "test"):
        condition = condition.parent
    is_comparison = condition.type == "comparison" and len(condition.children) == 3
    return condition.type == "not_test" or (
        is_comparison and _text(condition.children[1]) not in ("<", "<=", ">", ">=")
    )


def _is_duration(name: str) -> bool:
    return name == "timeout" or name.endswith("_seconds")


def _statement(leaf: Node) -> range:
    """The lines of the innermost statement; of a compound one those up to its block."""
    inner = leaf
    while inner.parent and inner.parent.type not in ("suite", "file_input"):
        if any(child.type == "suite" for child in inner.parent.children):
            break
        inner = inner.parent
    return _lines(inner, inner)


def _body(leaf: Node) -> range:
    """The lines of the outermost function's body; of a lambda outside functions its statement."""
    function = _function(leaf)
    if function is None:
        return _statement(leaf)
    body = function.children[-1]
    # A suite begins with the end of the line before it.
    first = body.children[1] if body.type == "suite" else body
    return _lines(first, body)


def _function(leaf: Node) -> Node | None:
    """The outermost one that has the leaf."""
    found = None
    inner = leaf
    while inner := inner.parent:
        if inner.type == "funcdef":
            found = inner
    return found


def _name(leaf: Node) -> str:
    """Of the outermost function, with its classes."""
    inner = _function(leaf)
    names: list[str] = []
    while inner is not None:
        if inner.type in ("funcdef", "classdef"):
            names.insert(0, inner.name.value)
        inner = inner.parent
    return ".".join(names)


def _lines(first: Node, last: Node) -> range:
    end_line, end_column = last.end_pos
    return range(first.start_pos[0], end_line + (end_column > 0))


def _is_call(node: Node) -> bool:
    return node.type in ("atom_expr", "power") and _text(node.children[-1]).startswith("(")


def _text(node: Node) -> str:
    return str(node.get_code(include_prefix=False)).strip()
