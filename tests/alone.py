"""One test in a pytest process of its own: no workers, and no other test before or after it."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from xml.etree import ElementTree

INTERRUPTIBLE = ("env", "--default-signal=INT")
"""Before a command that SIGINT is to end: what a shell starts in the background ignores it."""

# To clean up after SIGINT: a fixture's agents and a container runtime end in seconds.
_INTERRUPTED_SECONDS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """A finished process."""

    status: int | None
    """Its exit status, negative for a signal; None where the time limit ended it."""
    problem: str
    """Why the test has not passed, in one line; empty where it passed. A skipped test has not."""
    seconds: float
    """Of the test with its fixtures; of the process, where it ended without a result."""
    output: str
    """Both streams, with what pytest captured, also of a test that passed."""


def run(
    test: str, *, limit_seconds: float, arguments: Sequence[str] = (), directory: str | None = None
) -> Attempt:
    """Run one test to its end.

    :param test: its node id, from `directory`, or absolute
    :param limit_seconds: of the process; the test's own time limit is in force, too
    :param arguments: further ones for pytest
    :param directory: the working directory; None: this process's
    """
    with tempfile.TemporaryDirectory(prefix="podgate-alone-") as made:
        result, output = pathlib.Path(made, "result.xml"), pathlib.Path(made, "output")
        command = [*INTERRUPTIBLE, sys.executable, "-m", "pytest", *arguments, test, "-n0"]
        command += ["-q", "--no-header", "--color=no", "-rsxP"]
        # The default family of results rejects `record_property` with a warning.
        command += [f"--junitxml={result}", "-o", "junit_family=xunit1"]
        # A cache of its own, since it is no run whose failures `--lf` repeats.
        command += ["-o", f"cache_dir={made}/cache"]
        # These options are meant for whole runs: workers, a file of results.
        environment = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
        started = time.monotonic()
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=environment,
                process_group=0,
            )
        try:
            status: int | None = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        seconds = time.monotonic() - started
        cases = list(ElementTree.parse(result).iter("testcase")) if result.exists() else []
        if cases:
            seconds = sum(float(case.get("time", 0)) for case in cases)
        printed = output.read_text(errors="replace")
        return Attempt(status, _problem(status, cases), seconds, printed)


def _problem(status: int | None, cases: list[ElementTree.Element]) -> str:
    if status is None:
        return "ended by its time limit"
    for case in cases:
        for tag in ("failure", "error", "skipped"):
            if (found := case.find(tag)) is not None:
                return found.get("message", "").partition("\n")[0] or tag
    if status != 0 or len(cases) != 1:
        return f"pytest ended with status {status} and {len(cases)} results"
    return ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """After its time, or when this process is interrupted: first so that its fixtures clean up."""
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(_INTERRUPTED_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
