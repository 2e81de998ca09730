"""The plugin's YAML, as PyYAML reads it, and its colours."""

import io
import sys
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agent.operate.kubectl import output, printing

# YAML has no lone surrogates, and its keys have at most 1024 characters.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=100)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_yaml_is_read_as_the_same_value(value: object) -> None:
    assert yaml.safe_load("\n".join(output.yaml_lines(value))) == value


@pytest.mark.parametrize("word", ["yes", "No", "on", "null", "~", "12", "1e3", "2026-01-01", "="])
def test_text_that_looks_like_another_type_stays_text(word: str) -> None:
    lines = output.yaml_lines({"a": word, word: [word]})
    assert yaml.safe_load("\n".join(lines)) == {"a": word, word: [word]}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO, cell: Any) -> str:
    monkeypatch.setattr(sys, "stdout", terminal)
    printing.table([("A", "B"), (cell, "c")])
    return terminal.getvalue().splitlines()[1]


def test_colour_is_for_terminals_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    cell = printing.Cell("bad", printing.RED)
    assert printed(monkeypatch, Terminal(), cell) == "\x1b[31mbad\x1b[0m  c"
    assert printed(monkeypatch, io.StringIO(), cell) == "bad  c"
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(monkeypatch, Terminal(), cell) == "bad  c"
