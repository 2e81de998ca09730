"""What `make mutants` reports."""

import json
import pathlib

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants import equivalent

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


def varint(killed_by: str) -> mutants.Trial:
    difference = "-    if 0 <= value < 0x80:\n+    if  1 <= value < 0x80:"
    return mutants.Trial("probes/protocols/protobuf.py", 12, "varint", difference, TESTS, killed_by)


def test_mutants_that_are_the_same_program_do_not_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert mutants.report(iter([KILLED, varint("")]), None, is_complete=True)
    printed = capsys.readouterr().out
    assert "1 of 1 killed, 100.0 %" in printed
    assert "; 1 more are the same program" in printed
    assert "survived" not in printed


def test_mutant_that_a_test_kills_is_not_the_same_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not mutants.report(iter([KILLED, varint(mutants.KERNEL)]), None, is_complete=True)
    assert "not the same program" in capsys.readouterr().out


def test_each_of_them_is_in_its_function() -> None:
    assert list(equivalent.stale(pathlib.Path(__file__).parents[2])) == []
