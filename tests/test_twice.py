"""`pytest --twice`, in real runs of pytest."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
from xml.etree import ElementTree

import pytest

from tests import alone, twice
from tests.polling import PATIENCE_SECONDS, wait_until

ROOT = pathlib.Path(__file__).parents[1]
# `is_first` is true in the first process of a run that calls it with this name.
_CONFIGURATION = {
    "pytest.ini": """
        [pytest]
        addopts = --strict-markers -ra -p xdist -p pytest_timeout -p tests.twice -p tests.skips
        markers = kernel
    """,
    "calls.py": """
        import pathlib

        def is_first(name):
            try:
                pathlib.Path(__file__).with_name(f"called-{name}").touch(exist_ok=False)
            except FileExistsError:
                return False
            return True
    """,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A finished run of pytest."""

    directory: pathlib.Path
    status: int
    output: str

    @property
    def closing_line(self) -> str:
        return self.output.splitlines()[-1].strip("= ")

    @property
    def record(self) -> pathlib.Path:
        return self.directory / ".pytest_cache" / "v" / twice.RECORD


def _start(
    directory: pathlib.Path, source: str, *arguments: str, ci: str = ""
) -> "subprocess.Popen[str]":
    for name, text in {**_CONFIGURATION, "test_sample.py": source}.items():
        (directory / name).write_text(textwrap.dedent(text))
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    # Quicker: only the plugins that pytest.ini names.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": ci}
    return subprocess.Popen(
        [*alone.INTERRUPTIBLE, sys.executable, "-m", "pytest", *arguments],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run(directory: pathlib.Path, source: str, *arguments: str, ci: str = "") -> Run:
    with _start(directory, source, *arguments, ci=ci) as process:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return Run(directory, process.returncode, output)


_FLAKY = """
    import os
    import pytest
    from calls import is_first

    def test_passes():
        pass

    @pytest.mark.parametrize("path", ["a::b/c [d]"])
    def test_call(path):
        print("call printed", "this" if is_first("call") else "that")
        assert not is_first("call-failed"), "no reply\\nin time"

    @pytest.fixture
    def broken_setup():
        assert not is_first("setup"), "no node"

    def test_setup(broken_setup):
        pass

    @pytest.fixture
    def broken_teardown():
        yield
        assert not is_first("teardown"), "a link is left"

    class TestClass:
        def test_teardown(self, broken_teardown):
            pass

    def test_crash():
        if is_first("crash"):
            os._exit(9)
"""
# In the order in which pytest collects them.
_FAILURES = {
    "test_call[a::b/c [d]]": "AssertionError: no reply",
    "test_setup": "AssertionError: no node",
    "TestClass::test_teardown": "AssertionError: a link is left",
    "test_crash": "worker 'gwN' crashed while running 'test_sample.py::test_crash'",
}


def test_run_is_green_where_each_failed_test_passes_alone(tmp_path: pathlib.Path) -> None:
    arguments = ["--twice", "--junitxml=results.xml", "--junit-prefix=suite", "-n2"]
    run = _run(tmp_path, _FLAKY, *arguments)
    assert run.status == 0, run.output

    # Nothing claims that a test failed: at the end is the table.
    assert run.closing_line.startswith("1 passed, 4 flaky in ")
    for heading in ("short test summary", "= FAILURES =", "= ERRORS ="):
        assert heading not in run.output
    table = re.sub(r"gw\d", "gwN", run.output.partition("_ table of flaky tests _")[2])
    rows = re.findall(
        r"FLAKY test_sample\.py::(.+)\n  failed after [\d.]+ s: (.+)\n"
        r"  passed alone after [\d.]+ s\n",
        table,
    )
    assert dict(rows) == _FAILURES, run.output

    # The outputs of both runs of a test are printed.
    assert run.output.count("\ncall printed this\n") == 1
    assert run.output.count("\ncall printed that\n") == 1

    # They count as passed in the file of results, and for `--lf`.
    (suite,) = ElementTree.parse(tmp_path / "results.xml").iter("testsuite")
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    assert {case.get("name"): child.tag for case in suite for child in case} == {
        "test_call[a::b/c [d]]": "flakyFailure",
        "test_setup": "flakyError",
        "test_teardown": "flakyError",
        "test_crash": "flakyError",
    }
    last = tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed"
    assert not last.exists() or json.loads(last.read_text()) == {}

    # The record keeps them until they run again.
    recorded = json.loads(run.record.read_text())
    assert set(recorded) == {f"test_sample.py::{test}" for test in _FAILURES}
    assert recorded["test_sample.py::test_setup"]["failed"] == _FAILURES["test_setup"]
    again = _run(tmp_path, _FLAKY, "--twice", "-k", "setup")
    del recorded["test_sample.py::test_setup"]
    assert json.loads(again.record.read_text()) == recorded


def test_works_without_a_cache(tmp_path: pathlib.Path) -> None:
    run = _run(tmp_path, _FAILS_ONCE, "--twice", "-p", "no:cacheprovider")
    assert (run.status, run.closing_line.partition(" in ")[0]) == (0, "1 flaky"), run.output
    assert not (tmp_path / ".pytest_cache").exists()


_RED = """
    import time
    import pytest
    from calls import is_first

    def test_flaky():
        assert not is_first("flaky")

    def test_broken():
        assert not is_first("broken"), "this"
        assert False, "that"

    def test_skipped():
        assert not is_first("skipped")
        pytest.skip("no feature")

    @pytest.mark.timeout(1)
    def test_hangs():
        assert not is_first("hangs")
        time.sleep(100)
"""


def test_test_that_records_figures_runs_again(tmp_path: pathlib.Path) -> None:
    source = """
        import calls, pytest

        @pytest.mark.filterwarnings("error")
        def test_slow(record_property):
            record_property("figures", "3 of 4")
            assert not calls.is_first("slow")
    """
    run = _run(tmp_path, source, "--twice")
    assert run.status == 0
    assert run.closing_line.startswith("1 flaky")


def test_run_is_red_where_a_test_does_not_pass_alone(tmp_path: pathlib.Path) -> None:
    run = _run(tmp_path, _RED, "--twice")
    assert run.status == 1, run.output
    assert run.closing_line.startswith("3 failed, 1 flaky in ")
    failures = run.output.partition("= FAILURES =")[2].partition("= flaky =")[0]
    assert "E       AssertionError: this" in failures
    assert "run again, alone: failed again: AssertionError: that" in failures
    assert "E       AssertionError: that" in failures
    # A test that is skipped has not passed, and its own time limit is in force.
    assert "run again, alone: failed again: no feature" in failures
    assert "run again, alone: failed again: Failed: Timeout (>1.0s)" in failures


def test_nothing_runs_again_unless_the_command_line_has_the_option(tmp_path: pathlib.Path) -> None:
    run = _run(tmp_path, _FLAKY, "-k", "call")
    assert run.status == 1
    assert run.closing_line.startswith("1 failed, 4 deselected in ")


_FAILS_ONCE = """
    import pytest
    from calls import is_first

    def test_first():
        assert not is_first("first"), "no reply"
        is_first("again")
"""


@pytest.mark.parametrize(
    ("source", "arguments", "status", "reason"),
    [
        pytest.param(
            """
    @pytest.mark.parametrize("number", range(10))
    def test_other(number):
        assert False
            """,
            [],
            1,
            "11 tests failed, more than 10: none of them runs again",
            id="many failures",
        ),
        pytest.param("", ["-x"], 1, "stopping after 1 failures", id="exitfirst"),
        pytest.param("", ["-x", "-n1"], 2, "stopping after 1 failures", id="exitfirst, workers"),
        pytest.param(
            "    def test_other(): raise KeyboardInterrupt",
            [],
            2,
            "KeyboardInterrupt",
            id="interrupt",
        ),
        pytest.param(
            """
    import os
    def test_other(): os._exit(9)
    def test_never(): pass
            """,
            ["-n1", "--max-worker-restart=0"],
            1,
            "not every test ran: no failed test runs again",
            id="workers crashed",
        ),
    ],
)
def test_no_test_runs_again(
    tmp_path: pathlib.Path, source: str, arguments: list[str], status: int, reason: str
) -> None:
    run = _run(tmp_path, f"{_FAILS_ONCE}\n{source}", "--twice", *arguments)
    assert (run.status, run.closing_line.partition(" failed")[1]) == (status, " failed"), run.output
    assert reason in run.output
    assert "running again" not in run.output
    assert not (tmp_path / "called-again").exists()


def test_error_of_collection_leaves_the_run_red(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    run = _run(tmp_path, _FAILS_ONCE, "--twice", "--continue-on-collection-errors")
    assert run.status == 1
    assert run.closing_line.startswith("1 error, 1 flaky in "), run.output


def test_interrupt_ends_the_second_run_with_its_fixtures(tmp_path: pathlib.Path) -> None:
    source = """
    import time
    import pytest
    from calls import is_first

    @pytest.fixture
    def node():
        yield
        if not is_first("cleaned up once"):
            is_first("cleaned up twice")

    def test_hangs(node):
        assert not is_first("first")
        is_first("hangs")
        time.sleep(1000)
    """
    with _start(tmp_path, source, "--twice") as process:
        wait_until("second run", (tmp_path / "called-hangs").exists)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2, output
    assert "1 failed in " in output
    assert (tmp_path / "called-cleaned up twice").exists()


def test_no_test_runs_again_beside_the_tests_of_another_run(tmp_path: pathlib.Path) -> None:
    source = """
    import pathlib
    import time
    from calls import is_first

    ENDED = pathlib.Path(__file__).with_name("ended")

    def test_long():
        is_first("long")
        while not ENDED.exists():
            time.sleep(0.01)

    def test_fails_once():
        assert not is_first("failed")
        assert ENDED.exists(), "the other run has not ended"
    """
    with _start(tmp_path, source, "--twice", "-k", "long") as other:
        wait_until("the other run", (tmp_path / "called-long").exists)
        with _start(tmp_path, source, "--twice", "-k", "fails_once") as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line == "waiting for the end of the tests of another run\n":
                    break
            (tmp_path / "ended").touch()
            output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        other_output, _ = other.communicate(timeout=PATIENCE_SECONDS)
    assert (other.returncode, process.returncode) == (0, 0), other_output + output
    assert "1 deselected, 1 flaky in " in output


def test_kernel_test_that_is_skipped_makes_a_run_in_ci_red(tmp_path: pathlib.Path) -> None:
    source = """
    @pytest.mark.kernel
    def test_skipped():
        pytest.skip("no feature")
    """
    run = _run(tmp_path, f"{_FAILS_ONCE}\n{source}", "--twice", ci="1")
    assert run.status == 1
    assert "kernel tests were skipped in CI: test_sample.py::test_skipped" in run.output
    assert run.closing_line.startswith("1 skipped, 1 flaky in ")
