"""What `make mutants` reports."""

import json
import pathlib

import pytest

from tests.mutants import __main__ as mutants

TESTS = ("tests/agent/test_pod.py::test_a", "tests/agent/test_pod.py::test_b")
SURVIVOR = mutants.Trial("agent/pod.py", 8, "Pod.settle", "-a\n+b", TESTS, "")
KILLED = mutants.Trial("agent/pod.py", 9, "Pod.settle", "-a\n+c", TESTS, mutants.UNIT)


def test_list_has_a_line_for_each_survivor(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "survivors"
    trials = iter([KILLED, SURVIVOR])
    assert not mutants.report(trials, str(file), is_complete=True)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {
            "path": "agent/pod.py",
            "line": 8,
            "function": "Pod.settle",
            "difference": "-a\n+b",
            "tests": [*TESTS],
        }
    ]


def test_survivor_is_printed_with_the_files_that_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert not mutants.report(iter([KILLED, SURVIVOR]), None, is_complete=True)
    printed = capsys.readouterr().out
    assert "survived: agent/pod.py:8\n-a\n+b\n  tests: tests/agent/test_pod.py\n" in printed
    assert "1 of 2 killed, 50.0 % (goal: 100 %), 1 by unit tests, 0 by kernel tests" in printed
