"""A mutant is tried with all tests that run its line, in any process and at any time."""

import pytest

from tests.mutants import trees
from tests.mutants.record import Record

pytestmark = pytest.mark.kernel

PATH, TEST = "agent/pod.py", "tests/test_pod.py"
SOURCE = """\
def in_test():
    return 1


def in_table():
    return 2


def in_process():
    return 3


def in_fixture():
    return 4


def unused():
    return 5
"""
TESTS = """\
import subprocess
import sys

import pytest

from agent import pod


@pytest.fixture(scope="module")
def four():
    return pod.in_fixture()


@pytest.mark.parametrize("number", [pod.in_table()])
def test_table(number):
    assert number == 2


def test_process():
    code = "import sys; from agent import pod; sys.exit(pod.in_process())"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3


def test_one():
    assert pod.in_test() == 1


def test_fixture(four):
    assert four == 4
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    root, directory = (tmp_path_factory.mktemp(name) for name in ("root", "copy"))
    return trees.copy(root, {PATH: SOURCE, TEST: TESTS}, directory).record([TEST])


def names(record: Record, number: int) -> set[str]:
    """Of the tests for the function that returns the number, without their file's."""
    line = SOURCE.splitlines().index(f"    return {number}") + 1
    found = {name.removeprefix(f"{TEST}::") for name in record.tests_of(PATH, [line])}
    assert found.isdisjoint(record.failed)
    return found


def test_line_that_a_test_runs(record: Record) -> None:
    assert names(record, 1) == {"test_one"}


def test_line_that_a_process_of_a_test_runs(record: Record) -> None:
    assert names(record, 3) == {"test_process"}


@pytest.mark.parametrize("number", [2, 4])
def test_line_of_a_table_or_a_shared_fixture_concerns_all_tests_of_the_module(
    record: Record, number: int
) -> None:
    assert names(record, number) == {TEST, "test_one", "test_process"}


def test_line_that_nothing_runs(record: Record) -> None:
    assert names(record, 5) == set()
