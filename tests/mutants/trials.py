"""Copies of the tree in which tests run, with a mutant or without.

A copy is the only place that a mutant can change: its tests have a PID and a network namespace of
their own, and a file system that is read-only outside the copy. So a mutant of a call such as
kill() or unlink() harms nothing.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

import coverage
import pytest

from agent.linux.cgroups import cgroup2_mount
from tests.mutants import recording
from tests.mutants.entries import Entries
from tests.mutants.protocol import DESCRIPTOR, Request
from tests.mutants.record import Record
from tests.mutants.servers import Forks, ServerError, StartError
from tests.nodes import node, worker

_OPTIONS = ("-p", "no:cacheprovider", "-q", "--tb=short")
_UNIT, _KERNEL = ("-m", "not kernel"), ("-m", "kernel")
_PLUGIN = ("-p", "tests.mutants.recording")
# Its forks have a time limit of all their tests.
_SERVER = ("-p", "tests.mutants.trial_server", "--timeout=0", "--tb=no")
_HOOK = "tests/mutants/hook"
# Without a wait for threads that a failed test leaves.
_ENDING = "import os, sys, pytest; os._exit(pytest.main(sys.argv[1:]))"
# It ends with this process, and all that it started with it.
_TIED = ("setpriv", "--pdeathsig", "KILL")
# loopback as tests of sockets need it, writes only below $1, and a process group of its own:
# kill(0) reaches processes of the group in all namespaces.
_ISOLATED = (
    "ip link set lo up && mount --bind $1 $1 && mount -o remount,bind,ro / && cd $1/tree"
    ' && ulimit -t $2 && shift 2 && exec setsid "$@"'
)
_COVERAGE = """\
[run]
source = agent, bpf, probes
data_file = {directory}/coverage
parallel = true
patch = subprocess
sigterm = true
"""
# How much longer than without it the tests of a mutant may take, beside the start of a process.
_SLOWER = 4
_START_SECONDS = 30
# A fork starts at once, and its waits for a processor do not count.
_FORK_SECONDS = 5
# A recording of all tests takes minutes, of the kernel tests half an hour.
_RECORDING_SECONDS = 3600
_KERNEL_RECORDING_SECONDS = 4 * 3600
# For the worker of kernel tests, which compiles the programs.
_KERNEL_START_SECONDS = 60


class TrialError(Exception):
    """The tests cannot be run in a copy of the tree."""


class Copy:
    """One copy of the tree, for one run at a time."""

    def __init__(self, root: pathlib.Path, directory: pathlib.Path) -> None:
        self._directory = directory
        self.tree = directory / "tree"
        command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (root / name).exists():
                target = self.tree / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target, follow_symlinks=False)
        (self.tree / ".venv").symlink_to(root / ".venv")
        # The paths of unix sockets are short.
        self._temporary = directory / "t"
        self._temporary.mkdir(parents=True)
        # Processes of all copies have the same numbers.
        self._run_name = f"{os.getpid()}-{directory.name}-"
        # Later than that of each original, and different each time, so that Python never takes the
        # bytecode of another mutant.
        self._time = 2_000_000_000
        self._forks: Forks | None = None
        self._server_output = directory / "server"
        self.slow: Counter[str] = Counter()
        """Why mutants were tried by new processes, and how many."""

    def write(self, path: str, source: str) -> None:
        (self.tree / path).write_text(source)
        self._time += 1
        os.utime(self.tree / path, (self._time, self._time))

    def record(self, tests: Collection[str]) -> Record:
        """Run test files without a mutant. Raises `TrialError`."""
        settings = self._directory / "coveragerc"
        settings.write_text(_COVERAGE.format(directory=self._directory))
        report = self._directory / "record.json"
        command = ("-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", *_OPTIONS)
        ended = self._run(
            [*command, *_UNIT, *_PLUGIN, *tests],
            _RECORDING_SECONDS,
            {recording.RECORD: str(report)},
        )
        if not report.exists():
            raise TrialError(f"the tests do not run: {ended.stdout}{ended.stderr}")
        data = coverage.CoverageData(str(self._directory / "coverage"))
        combined = coverage.Coverage(data_file=str(self._directory / "coverage"))
        combined.combine(strict=True)
        data.read()
        lines: dict[str, dict[int, set[str]]] = defaultdict(dict)
        for name in data.measured_files():
            module = pathlib.Path(name)
            if module.is_relative_to(self.tree):
                contexts = data.contexts_by_lineno(name)
                lines[str(module.relative_to(self.tree))] = {
                    line: set(files) for line, files in contexts.items()
                }
        return Record(dict(lines), **json.loads(report.read_text()))

    def record_entries(self, tests: Collection[str], workers: int, entries: Entries) -> None:
        """Add what these files of kernel tests enter. The copy is for this alone: the bytecode of
        its modules records entries from now on. Raises `TrialError`."""
        report = self._directory / "record.json"
        report.unlink(missing_ok=True)
        lines = self._directory / "entries"
        lines.write_bytes(b"")
        variables = {
            recording.RECORD: str(report),
            recording.ENTRIES: str(lines),
            "PYTHONPATH": f"{self.tree / _HOOK}:{self.tree}",
        }
        ended = self._run(
            ["-m", "pytest", *_OPTIONS, *_KERNEL, *_PLUGIN, f"-n{workers}", *tests],
            _KERNEL_RECORDING_SECONDS,
            variables,
        )
        if not report.exists():
            raise TrialError(f"the kernel tests do not run: {ended.stdout}{ended.stderr}")
        with lines.open() as content:
            entries.add(content, json.loads(report.read_text()), self.tree, tests)

    def kernel_tests_detect(
        self, tests: Collection[str], seconds: float, path: str, changed: str, source: str
    ) -> bool:
        """Whether kernel tests fail with the changed module, and what failed passes with the
        source: it may fail because of other load. seconds: what the tests take."""
        self.write(path, changed)
        failed = self._failing_kernel_tests(tests, seconds)
        self.write(path, source)
        return bool(failed) and not self._failing_kernel_tests(failed, seconds)

    def _failing_kernel_tests(self, tests: Collection[str], seconds: float) -> Collection[str]:
        """The first that fails; all of them if they do not end."""
        report = self._directory / "record.json"
        report.unlink(missing_ok=True)
        limit = _KERNEL_START_SECONDS + _SLOWER * seconds
        options = ("-x", f"--timeout={limit:.0f}")
        try:
            self._run(
                ["-m", "pytest", *_OPTIONS, *_KERNEL, *_PLUGIN, *options, *tests],
                limit,
                {recording.RECORD: str(report)},
            )
        except subprocess.TimeoutExpired:
            return tests
        # Without a report pytest does not start.
        return json.loads(report.read_text())["failed"] if report.exists() else tests

    def unit_tests_detect(
        self, steps: Collection[list[str]], record: Record, path: str, changed: str, source: str
    ) -> bool:
        """Whether unit tests fail with the changed module: tried by a fork of the copy's server, or
        by new processes, one for each step, if that cannot. record: of all tests. Raises
        `TrialError`."""
        tests = tuple(test for step in steps for test in step)
        limits = {test: _fork_limit(record.duration([test])) for test in tests}
        limit = _fork_limit(record.duration(tests))
        again: Collection[list[str]] = []
        try:
            self._forks = self._forks or self._start_forks(record)
            request = Request(path, source, changed, tests, limits, limit)
            is_detected, left = self._forks.try_(request)
            if left and not is_detected:
                self.slow["tests fail in a fork without a mutant"] += 1
                again = [left]
        except ServerError as error:
            self.slow[str(error)] += 1
            is_detected, again = False, steps
        except StartError as error:
            output = self._server_output.read_text()
            raise TrialError(f"the trial server does not start: {error}\n{output}") from error
        self.write(path, changed)
        is_detected |= any(not self._passes(step, record) for step in again)
        self.write(path, source)
        return is_detected

    def close(self) -> None:
        """End the copy's server."""
        if self._forks is not None:
            self._forks.close()

    def _start_forks(self, record: Record) -> Forks:
        def start(descriptor: int) -> "subprocess.Popen[bytes]":
            arguments = ("-m", "pytest", *_OPTIONS, *_UNIT, *_SERVER, *record.files())
            with self._server_output.open("wb") as output:
                return subprocess.Popen(
                    self._command("unlimited", arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._environment({DESCRIPTOR: str(descriptor)}),
                    pass_fds=[descriptor],
                )

        return Forks(start, self.write, record.failed)

    def _passes(self, tests: Collection[str], record: Record) -> bool:
        """Whether tests, or all of a file, pass with what was written."""
        files = {test.partition("::")[0] for test in tests}
        left_out = [
            f"--deselect={name}" for name in record.failed if name.partition("::")[0] in files
        ]
        limit = _START_SECONDS + _SLOWER * record.duration(tests)
        named = self._directory / "tests"
        named.write_text("\n".join(tests))
        options = ("-x", f"--timeout={limit:.0f}", *left_out, f"@{named}")
        try:
            ended = self._run(["-c", _ENDING, *_OPTIONS, *_UNIT, *options], limit, {})
        except subprocess.TimeoutExpired:
            return False
        return ended.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)

    def _run(
        self, arguments: list[str], seconds: float, variables: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run pytest in the copy. seconds: of processor time, and ten times that of real time,
        which others on the machine stretch. Raises `subprocess.TimeoutExpired`."""
        try:
            return subprocess.run(
                self._command(f"{seconds:.0f}", arguments),
                capture_output=True,
                text=True,
                check=False,
                timeout=10 * seconds,
                env=self._environment(variables),
            )
        finally:
            self._remove_cgroups()

    def _command(self, seconds: str, arguments: Collection[str]) -> list[str]:
        """Python in namespaces of its own. seconds: of processor time, or "unlimited"."""
        namespaces = ("--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--mount")
        isolated = ("sh", "-c", _ISOLATED, "sh", str(self._directory), seconds)
        base = f"--basetemp={self._temporary}/t"
        return [*_TIED, "unshare", *namespaces, *isolated, sys.executable, *arguments, base]

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "TMPDIR": str(self._temporary),
            worker.RUN: self._run_name,
            **variables,
        }

    def _remove_cgroups(self) -> None:
        """Those that the workers of kernel tests left because they were killed."""
        mount = cgroup2_mount()
        if mount is not None:
            for left in mount.glob(f"{worker.CGROUPS}{self._run_name}*"):
                node.remove(left.name)


def _fork_limit(seconds: float) -> float:
    """Of tests that take this long without a mutant."""
    return _FORK_SECONDS + _SLOWER * seconds
