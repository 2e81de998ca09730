"""Kernel tests of a mutant: which there are, and which are tried."""

import ast
import pathlib
from typing import Any

import pytest

from tests.mutants import entries, modules
from tests.mutants.hook import sitecustomize

PORTS = "agent/gates/ports.py:Ports.add"


def record(seconds: dict[str, float], *lines: str) -> entries.Entries:
    found = entries.Entries()
    found.add(lines, {"seconds": seconds, "failed": []}, pathlib.Path(), [])
    return found


def test_tests_that_enter_a_function_are_tried_the_nearest_and_quickest_first() -> None:
    seconds = {
        "tests/kernel/test_a.py::test_slow": 3,
        "tests/kernel/test_a.py::test_quick": 1,
        "tests/kernel/test_b.py::test_quickest": 0.5,
        "tests/kernel/test_port.py::test_near": 9,
        "tests/kernel/test_port.py::test_elsewhere": 0.1,
    }
    lines = [f"{test}\t{PORTS}\n" for test in seconds if not test.endswith("elsewhere")]
    found = record(seconds, *lines, "tests/kernel/test_port.py::test_elsewhere\tagent/a.py:b\n")
    assert found.tests_of("agent/gates/ports.py", "Ports.add") == [
        "tests/kernel/test_port.py::test_near",
        "tests/kernel/test_b.py::test_quickest",
        "tests/kernel/test_a.py::test_quick",
        "tests/kernel/test_a.py::test_slow",
    ]


def test_tests_of_a_mutant_take_half_a_minute_or_are_one() -> None:
    tests = {f"tests/kernel/test_{letter}.py::test": 14.0 for letter in "abc"}
    found = record(tests, *(f"{test}\t{PORTS}\n" for test in tests))
    assert len(found.tests_of("agent/gates/ports.py", "Ports.add")) == 2
    found.seconds = dict.fromkeys(tests, 60.0)
    assert len(found.tests_of("agent/gates/ports.py", "Ports.add")) == 1


def test_test_that_fails_without_a_mutant_is_not_tried() -> None:
    found = record({}, f"tests/kernel/test_a.py::test\t{PORTS}\n")
    found.failed = ["tests/kernel/test_a.py::test"]
    assert found.tests_of("agent/gates/ports.py", "Ports.add") == []


def test_record_is_kept_until_a_test_file_changes(tmp_path: pathlib.Path) -> None:
    (tmp_path / ".venv").mkdir()
    assert entries.Entries.read(tmp_path) == entries.Entries()
    files = ["a.py", "b.py", "c.py"]
    for name in files:
        (tmp_path / name).write_text("1")
    made = entries.Entries()
    tests = {"a.py::test": 1.0, "b.py::test": 2.0, "c.py::test": 3.0}
    lines = [f"{test}\t{PORTS}\n" for test in tests]
    made.add(lines, {"seconds": tests, "failed": [*tests]}, tmp_path, files)
    made.write(tmp_path)
    again = entries.Entries.read(tmp_path)
    assert again == made
    assert again.keep_only(tmp_path, files) == []
    assert again == made
    (tmp_path / "b.py").write_text("2")
    assert again.keep_only(tmp_path, ["a.py", "b.py"]) == ["b.py"]
    assert again.functions == {"a.py::test": [PORTS]}
    assert again.seconds == {"a.py::test": 1.0}
    assert (again.failed, [*again.files]) == (["a.py::test"], ["a.py"])


def test_kernel_tests_are_those_of_the_suite() -> None:
    found = modules.kernel_tests(pathlib.Path(modules.__file__).parents[2])
    assert {"tests/kernel/test_agent.py", "tests/node/test_lives.py"} <= {*found}
    assert "tests/mutants/test_mutations.py" not in found
    assert not [path for path in found if path.startswith(("tests/cluster", "tests/kernel/dev"))]


def test_functions_and_methods_report_their_entry_once_in_a_test(tmp_path: pathlib.Path) -> None:
    source = '''
class Ports:
    def add(self):
        """Adds."""
        def inner():
            return 2
        return inner()

async def wait(): ...
'''
    tree = sitecustomize.Entries("agent/ports.py").visit(ast.parse(source))
    entered: list[str] = []
    names: dict[str, Any] = {sitecustomize.ENTERED: entered.append}
    exec(compile(ast.fix_missing_locations(tree), "ports.py", "exec"), names)
    ports = names["Ports"]()
    assert ports.add() == 2
    assert entered == ["agent/ports.py:Ports.add"]
    assert ports.add.__doc__ == "Adds."


def test_entry_is_written_once_for_each_test(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "entries").touch()
    recorder = sitecustomize.Recorder(str(tmp_path / "entries"), "TEST_NAME")
    for test in ("a", "a", "b"):
        monkeypatch.setenv("TEST_NAME", test)
        recorder.entered(PORTS)
    assert (tmp_path / "entries").read_text() == f"a\t{PORTS}\nb\t{PORTS}\n"
