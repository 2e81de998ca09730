"""Mutants are tried by forks of one server, which they cannot harm, or else by new processes."""

from collections.abc import Iterator

import pytest

from tests.mutants import trees, trials
from tests.mutants.record import Record
from tests.nodes import leftovers

pytestmark = pytest.mark.kernel

SOURCE = """\
import contextlib
import functools
import os

LIMIT = 8


class Pod:
    def method(self):
        return 1

    @property
    def shown(self):
        return 2


@contextlib.contextmanager
def opened():
    yield 3


def outer():
    def inner():
        return 4

    return inner()


def unused():
    return 5
"""
TESTS = """\
import os
import sys
import tempfile

import agent.pod as pod


def test_limit():
    assert pod.LIMIT == 8


def test_method(tmp_path):
    (tmp_path / "file").touch()
    tempfile.mkdtemp()
    assert pod.Pod().method() == 1


def test_shown():
    assert pod.Pod().shown == 2


def test_opened():
    with pod.opened() as number:
        assert number == 3


def test_outer():
    assert pod.outer() == 4


def test_only_in_new_process():
    assert "tests.mutants.trial_server" not in sys.modules
    assert pod.unused() == 5
"""
PATH, TEST = "agent/pod.py", "tests/test_pod.py"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trials.Copy]:
    """Of a tree with one module, one test file and the trial server."""
    root, directory = (tmp_path_factory.mktemp(name) for name in ("root", "copy"))
    with leftovers.lasting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "_FORK_SECONDS", 2)
        made = trees.copy(root, {PATH: SOURCE, TEST: TESTS}, directory)
        yield made
        made.close()


def detect(copy: trials.Copy, old: str, new: str, *tests: str) -> tuple[bool, bool]:
    """Whether tests detect a mutant, and whether a fork did; without tests: all but the last."""
    names = tests or ("limit", "method", "shown", "opened", "outer")
    steps = [[f"{TEST}::test_{name}"] for name in names]
    record = Record(seconds={TEST: 0.1})
    before = copy.slow.copy()
    assert old in SOURCE
    changed = SOURCE.replace(old, new)
    is_detected = copy.unit_tests_detect(steps, record, PATH, changed, SOURCE)
    assert (copy.tree / PATH).read_text() == SOURCE
    return is_detected, copy.slow == before


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_fork_detects_mutant_of_any_function(copy: trials.Copy, number: int) -> None:
    """In a method, a property, a context manager and a nested function."""
    assert detect(copy, f" {number}\n", f" {number + 1}\n") == (True, True)


def test_mutant_without_effect_survives(copy: trials.Copy) -> None:
    assert detect(copy, "return 5", "return 6") == (False, True)


def test_constant_is_tried_by_a_new_process(copy: trials.Copy) -> None:
    assert detect(copy, "LIMIT = 8", "LIMIT = 9") == (True, False)


@pytest.mark.parametrize("hang", ["while True: pass", "__import__('time').sleep(1000)"])
def test_mutant_that_hangs_is_detected(copy: trials.Copy, hang: str) -> None:
    assert detect(copy, "return 1", hang) == (True, True)


@pytest.mark.parametrize(
    "harm",
    [
        "os.kill(os.getppid(), 9)",
        "os.kill(0, 9)",
        "os.kill(-1, 9)",
        "os._exit(0)",
        "os.closerange(0, 1000)",
        "os.fork() or os._exit(0)",
    ],
)
def test_mutant_ends_no_server(copy: trials.Copy, harm: str) -> None:
    detect(copy, "return 1", f"{harm}; return 1")
    assert detect(copy, "return 5", "return 6") == (False, True)
    assert detect(copy, "return 2", "return 3") == (True, True)


def test_exit_is_a_failure(copy: trials.Copy) -> None:
    assert detect(copy, "return 1", "os._exit(0)") == (True, True)


def test_test_that_fails_in_every_fork_has_a_new_process(copy: trials.Copy) -> None:
    tests = ("method", "only_in_new_process")
    assert detect(copy, "return 5", "return 6", *tests) == (True, False)
    assert detect(copy, "return 2", "return 3", *tests) == (False, False)
    assert detect(copy, "return 1", "return 2", *tests) == (True, True)


def test_forks_leave_no_files(copy: trials.Copy) -> None:
    assert detect(copy, "return 5", "return 6", "method") == (False, True)
    assert list((copy.tree.parent / "t").iterdir()) == []
