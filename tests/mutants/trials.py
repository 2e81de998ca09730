"""Copies of the tree in which tests run, with a mutant or without, and what tests run which lines.

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
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import coverage
import pytest

from agent.linux.cgroups import cgroup2_mount
from tests.mutants import recording
from tests.mutants.entries import Entries
from tests.nodes import node, worker

_OPTIONS = ("-p", "no:cacheprovider", "-q", "--tb=short")
_UNIT, _KERNEL = ("-m", "not kernel"), ("-m", "kernel")
_PLUGIN = ("-p", "tests.mutants.recording")
_HOOK = "tests/mutants/hook"
# Without a wait for threads that a failed test leaves.
_ENDING = "import os, sys, pytest; os._exit(pytest.main(sys.argv[1:]))"
# It ends with this process, and all that it started with it.
_TIED = ("setpriv", "--pdeathsig", "KILL")
# loopback as tests of sockets need it, and writes only below $1.
_ISOLATED = (
    "ip link set lo up && mount --bind $1 $1 && mount -o remount,bind,ro / && cd $1/tree"
    ' && ulimit -t $2 && shift 2 && exec "$@"'
)
_COVERAGE = """\
[run]
source = agent, bpf, probes
data_file = {directory}/coverage
parallel = true
patch = subprocess
sigterm = true
context = ${{{context}-}}
"""
# Coverage's context of what no test runs.
_AT_IMPORT = ""
# How much longer than without it the tests of a mutant may take, beside the start of a process.
_SLOWER = 4
_START_SECONDS = 30
# A recording of all tests takes minutes, of the kernel tests half an hour.
_RECORDING_SECONDS = 3600
_KERNEL_RECORDING_SECONDS = 4 * 3600
# For the worker of kernel tests, which compiles the programs.
_KERNEL_START_SECONDS = 60


class TrialError(Exception):
    """The tests cannot be run in a copy of the tree."""


@dataclass(slots=True)
class Record:
    """What unit tests run, from one run without a mutant."""

    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """By module and line: the tests that run it, as pytest names functions."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By test, and by file."""
    failed: list[str] = field(default_factory=list)
    """Tests that fail without a mutant, which cannot detect one."""

    @classmethod
    def merged(cls, parts: Iterable["Record"]) -> "Record":
        """Of runs of different tests."""
        whole = cls()
        for part in parts:
            whole.seconds |= part.seconds
            whole.failed += part.failed
            for path, by_line in part.lines.items():
                into = whole.lines.setdefault(path, {})
                for line, tests in by_line.items():
                    into[line] = into.get(line, set()) | tests
        return whole

    def duration(self, tests: Iterable[str]) -> float:
        """How many seconds tests take, or all of a file."""
        return sum(self.seconds.get(test, 0) for test in tests)

    def runs(self, path: str) -> set[str]:
        """The tests that run a function of a module."""
        return set().union(*self.lines.get(path, {}).values()) - {_AT_IMPORT}

    def tests_of(self, path: str, lines: Iterable[int]) -> set[str]:
        """The tests that run one of these lines of a module; what runs at import, such as a
        constant, concerns all that run the module."""
        by_line = self.lines.get(path, {})
        found = set().union(*(by_line.get(line, set()) for line in lines))
        return self.runs(path) if found == {_AT_IMPORT} else found - {_AT_IMPORT}


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
        (directory / "tmp").mkdir(parents=True)
        # Processes of all copies have the same numbers.
        self._run_name = f"{os.getpid()}-{directory.name}-"
        # Later than that of each original, and different each time, so that Python never takes the
        # bytecode of another mutant.
        self._time = 2_000_000_000

    def write(self, path: str, source: str) -> None:
        (self.tree / path).write_text(source)
        self._time += 1
        os.utime(self.tree / path, (self._time, self._time))

    def record(self, tests: Collection[str]) -> Record:
        """Run test files without a mutant. Raises `TrialError`."""
        settings = self._directory / "coveragerc"
        content = _COVERAGE.format(directory=self._directory, context=recording.CONTEXT)
        settings.write_text(content)
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

    def passes(self, tests: Collection[str], seconds: float, without: Collection[str]) -> bool:
        """Whether tests, or all of a file, pass with what was written.

        seconds: what they take without a mutant; without: tests that are left out.
        """
        files = {test.partition("::")[0] for test in tests}
        left_out = [f"--deselect={name}" for name in without if name.partition("::")[0] in files]
        limit = _START_SECONDS + _SLOWER * seconds
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
        namespaces = ("--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--mount")
        isolated = ("sh", "-c", _ISOLATED, "sh", str(self._directory), f"{seconds:.0f}")
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "TMPDIR": str(self._directory / "tmp"),
            worker.RUN: self._run_name,
            **variables,
        }
        # The paths of unix sockets are short.
        base = f"--basetemp={self._directory}/t"
        command = [*_TIED, "unshare", *namespaces, *isolated, sys.executable]
        try:
            return subprocess.run(
                [*command, *arguments, base],
                capture_output=True,
                text=True,
                check=False,
                timeout=10 * seconds,
                env=environment,
            )
        finally:
            self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        """Those that the workers of kernel tests left because they were killed."""
        mount = cgroup2_mount()
        if mount is not None:
            for left in mount.glob(f"{worker.CGROUPS}{self._run_name}*"):
                node.remove(left.name)
