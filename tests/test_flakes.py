"""`make flakes`: how often a test fails, and what it prints then."""

import json
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from tests import alone, flakes, load
from tests.polling import wait_until

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are in the working directory; without plugins they start in half the time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pathlib.Path("pytest.ini").write_text("[pytest]\naddopts = -p xdist\n")


def _write_sample(source: str) -> None:
    pathlib.Path("test_sample.py").write_text(textwrap.dedent(source))


def test_rate_and_outputs_of_both_kinds_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _write_sample("""
        import pathlib

        def test_sample():
            calls = pathlib.Path("calls")
            with calls.open("a") as file:
                file.write("x")
            number = len(calls.read_text())
            print(f"call {number}")
            assert number % 2 == 0, "no reply"
    """)
    assert flakes.main(["test_sample.py::test_sample", "--times", "4"]) == 1
    printed = capsys.readouterr().out
    first, _, outputs = printed.partition("--- the first run that failed\n")
    assert first.startswith("test_sample.py::test_sample F.F.\n  failed 2 of 4 (50%); slowest ")
    assert first.endswith(" s\n  2 of 2: AssertionError: no reply\n")
    failed, _, passed = outputs.partition("--- the first run that passed\n")
    assert "\ncall 1\n" in failed
    assert "\ncall 2\n" in passed


def test_test_that_does_not_exist_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    _write_sample("")
    assert flakes.main(["test_sample.py::test_other", "--times", "4"]) == 2
    assert capsys.readouterr().out.count("ERROR: not found") == 1


def test_hanging_test_ends_with_the_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    _write_sample("""
        import time

        def test_sample():
            time.sleep(1000)
    """)
    assert flakes.main(["test_sample.py", "--minutes", "0.02"]) == 1
    assert "1 of 1: ended by its time limit" in capsys.readouterr().out


def test_recorded_tests_are_the_default(tmp_path: pathlib.Path) -> None:
    record = tmp_path / "record"
    assert flakes.recorded(record) == []
    record.write_text(json.dumps({"test_a.py::test_b": {"failed": "no reply"}}))
    assert flakes.recorded(record) == ["test_a.py::test_b"]


def test_process_that_ends_without_a_result_has_not_passed() -> None:
    _write_sample("""
        import os

        def test_sample():
            os._exit(0)
    """)
    attempt = alone.run("test_sample.py::test_sample", limit_seconds=100)
    assert attempt.problem == "pytest ended with status 0 and 0 results"


def test_process_that_ignores_an_interrupt_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_INTERRUPTED_SECONDS", 0.1)
    _write_sample("""
        import signal
        import time

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(1000)
    """)
    attempt = alone.run("test_sample.py", limit_seconds=2)
    assert (attempt.status, attempt.problem) == (None, "ended by its time limit")


def test_load_ends_with_its_block() -> None:
    with load.busy_processors() as loops:
        assert all(_runs(loop) for loop in loops)
    assert not any(_runs(loop) for loop in loops)


def test_load_ends_when_its_process_is_killed() -> None:
    source = (
        "import json, time\n"
        "from tests import load\n"
        "with load.busy_processors() as loops:\n"
        "    print(json.dumps(loops), flush=True)\n"
        "    time.sleep(1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, cwd=_ROOT
    ) as process:
        assert process.stdout is not None
        loops = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    wait_until("end of the loops", lambda: not any(_runs(loop) for loop in loops))


def _runs(pid: int) -> bool:
    """Whether a process exists, and is no zombie, which its new parent has yet to reap."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(") ")[2][0] != "Z"
