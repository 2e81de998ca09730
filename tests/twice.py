"""`pytest --twice`: a test that fails runs again, alone, after all workers have ended.

If it fails again, the run is red and shows both outputs. If it passes, it is flaky: the run is
green, ends with a table of its flaky tests, and keeps them for `make flakes`. The first failure
counts until the second run has passed, so whatever goes wrong in between leaves the run red.

Only tests run again: not after an error of collection or usage, nor in a run that ended before its
last test (`-x`, an interrupt, too many crashed workers), nor where more than `_MOST` fail.

Alone means also: while no other such run of this directory has tests to run. `make test` has two
at once, of unit tests and of kernel tests; the one that ends first waits for the other before it
runs a test again.

pytest-rerunfailures repeats a test at once, in the same process and beside the other workers. That
is the load under which it failed, so it cannot separate a flaky test from a broken one.
"""

import contextlib
import dataclasses
import fcntl
import os
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterator
from xml.etree import ElementTree

import pytest

from tests import alone

# More than that is a broken tree, or a broken machine.
_MOST = 10
# To import, to compile programs, to remove a cluster; in addition to faulthandler_timeout, after
# which pytest ends itself where a test outlives its own time limit.
_START_SECONDS = 300
RECORD = "twice/flaky"
"""The flaky tests, as a key of pytest's cache: per test its `Flaky`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flaky:
    """A test that failed, and passed alone."""

    failed: str
    """The failure in one line."""
    seconds: float
    alone_seconds: float
    """The same, of the run that passed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--twice",
        action="store_true",
        help="run each failed test again, alone, at the end; if all pass, the run is green, "
        "with a table of its flaky tests",
    )


@pytest.hookimpl(trylast=True)  # after the terminal's reporter is registered
def pytest_configure(config: pytest.Config) -> None:
    """Does nothing in workers, nor where a debugger has stopped at each failure."""
    option = config.option
    if not option.twice or option.collectonly or option.usepdb or hasattr(config, "workerinput"):
        return
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(_Twice(config, terminal))


class _Twice:
    """Collects failures, and runs them again."""

    def __init__(self, config: pytest.Config, terminal: pytest.TerminalReporter) -> None:
        self._config = config
        self._terminal = terminal
        self._started: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        """Of each test that ran, and not of its reports, since a crash has none."""
        self._failures: defaultdict[str, list[pytest.TestReport]] = defaultdict(list)
        self._flaky: dict[str, Flaky] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        now = time.monotonic()
        # A worker can end before it reports the start of its next test, which is then what crashed.
        self._seconds[report.nodeid] = now - self._started.setdefault(report.nodeid, now)
        if report.failed and not hasattr(report, "wasxfail"):
            self._failures[report.nodeid].append(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        with _turns(self._config, self._terminal) as turns:
            turns.share()
            # A run that was interrupted, or has failures enough, ends here by an exception.
            result = yield
            if self._failures:
                self._run_failures_again(session, turns)
            return result

    def _run_failures_again(self, session: pytest.Session, turns: "_Turns") -> None:
        self._terminal.write_line("")
        if len(self._failures) > _MOST:
            reason = f"{len(self._failures)} tests failed, more than {_MOST}"
            self._terminal.write_line(f"{reason}: none of them runs again", red=True)
        elif len(self._seconds) < session.testscollected:
            self._terminal.write_line("not every test ran: no failed test runs again", red=True)
        else:
            if workers := self._config.pluginmanager.get_plugin("dsession"):
                workers.nodemanager.teardown_nodes()
            turns.have_alone()
            for test in self._failures:
                self._run_again(session, test)

    def _run_again(self, session: pytest.Session, test: str) -> None:
        self._terminal.write_line(f"running again, alone: {test}")
        attempt = alone.run(
            f"{self._config.rootpath}/{test}",
            limit_seconds=_START_SECONDS + float(self._config.getini("faulthandler_timeout")),
            arguments=_arguments(self._config),
            directory=str(self._config.invocation_params.dir),
        )
        outcome = f"failed again: {attempt.problem}" if attempt.problem else "passed"
        self._terminal.write_line(f"  {outcome}")
        reports = self._failures[test]
        reports[-1].sections.append((f"run again, alone: {outcome}", attempt.output))
        if not attempt.problem:
            self._flaky[test] = Flaky(_sentence(reports[0]), self._seconds[test], attempt.seconds)
            self._forget(session, test)

    def _forget(self, session: pytest.Session, test: str) -> None:
        """Take the failure back where pytest has counted it."""
        reports = self._failures[test]
        session.testsfailed -= len(reports)
        stats = self._terminal.stats
        for category, counted in list(stats.items()):
            stats[category] = [
                one
                for one in counted
                if not isinstance(one, pytest.TestReport) or one.nodeid != test
            ]
            if not stats[category]:
                del stats[category]
        stats.setdefault("flaky", []).append(reports[0])
        if last_failed := self._config.pluginmanager.get_plugin("lfplugin"):
            first = reports[0]
            last_failed.pytest_runtest_logreport(
                pytest.TestReport(test, first.location, first.keywords, "passed", None, "call")
            )

    @pytest.hookimpl(trylast=True)  # after the file of results is written
    def pytest_sessionfinish(self) -> None:
        if self._flaky and self._config.option.xmlpath:
            _rename_failures(
                self._config.option.xmlpath, self._config.option.junitprefix, self._flaky
            )
        cache: pytest.Cache | None = getattr(self._config, "cache", None)
        if cache is not None:
            # A run of other tests, such as `make test-kernel` after `make test-unit`, keeps these.
            kept = {
                test: flaky
                for test, flaky in cache.get(RECORD, {}).items()
                if test not in self._seconds
            }
            flaky = {test: dataclasses.asdict(flaky) for test, flaky in self._flaky.items()}
            cache.set(RECORD, kept | flaky)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self) -> Generator[None]:
        yield
        if not self._flaky:
            return
        write = self._terminal.write_line
        self._terminal.write_sep("=", "flaky", yellow=True, bold=True)
        for test in self._flaky:
            for report in self._failures[test]:
                self._terminal.write_sep("_", f"{report.when} of {test}", yellow=True)
                write(report.longreprtext)
                for name, content in report.sections:
                    self._terminal.write_sep("-", name)
                    write(content.rstrip("\n"))
        self._terminal.write_sep("_", "table of flaky tests", yellow=True, bold=True)
        for test, flaky in self._flaky.items():
            write(f"FLAKY {test}", yellow=True)
            write(f"  failed after {flaky.seconds:.1f} s: {flaky.failed}")
            write(f"  passed alone after {flaky.alone_seconds:.1f} s")
        write(
            "Find the cause first (CONTRIBUTING.md, Flaky tests); `make flakes` measures the rate."
        )


class _Turns:
    """Who runs tests of a directory: several runs at once, or one of them alone.

    A lock of the directory itself (flock(2)), which needs no file, and ends with its process. A run
    that wants the directory alone gives up its share first, so two of them cannot wait for each
    other.
    """

    def __init__(self, descriptor: int, terminal: pytest.TerminalReporter) -> None:
        self._descriptor = descriptor
        self._terminal = terminal

    def share(self) -> None:
        self._lock(fcntl.LOCK_SH, "the second runs of another run's tests")

    def have_alone(self) -> None:
        self._lock(fcntl.LOCK_EX, "the tests of another run")

    def _lock(self, how: int, of: str) -> None:
        try:
            fcntl.flock(self._descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            self._terminal.write_line(f"waiting for the end of {of}")
            # Now, also in a pipe: the wait may be long.
            self._terminal.flush()
            fcntl.flock(self._descriptor, how)


@contextlib.contextmanager
def _turns(config: pytest.Config, terminal: pytest.TerminalReporter) -> Iterator[_Turns]:
    descriptor = os.open(config.rootpath, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _Turns(descriptor, terminal)
    finally:
        os.close(descriptor)


def _arguments(config: pytest.Config) -> list[str]:
    """What a test can depend on of the command line; the environment is the same."""
    option = config.option
    arguments = [f"--rootdir={config.rootpath}"]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    if option.timeout is not None:
        arguments += [f"--timeout={option.timeout}"]
    for flag, values in (
        ("-o", option.override_ini),
        ("-W", option.pythonwarnings),
        ("-p", [name for name in option.plugins if not name.startswith("no:")]),
    ):
        for value in values or ():
            arguments += [flag, value]
    return arguments


def _sentence(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines()
    return lines[0] if lines else "no output"


def _rename_failures(path: str, prefix: str | None, tests: Collection[str]) -> None:
    """Make each failure of these tests in a JUnit file what Maven's Surefire made of it: an element
    `flakyFailure` or `flakyError`, in a test case that counts as passed.
    """
    names = {_junit_name(test, prefix) for test in tests}
    tree = ElementTree.parse(path)
    for suite in tree.iter("testsuite"):
        for case in suite.iter("testcase"):
            if (case.get("classname"), case.get("name")) not in names:
                continue
            for tag, count in (("failure", "failures"), ("error", "errors")):
                for element in case.findall(tag):
                    element.tag = f"flaky{tag.capitalize()}"
                    suite.set(count, str(int(suite.get(count, "0")) - 1))
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _junit_name(test: str, prefix: str | None) -> tuple[str, str]:
    """The attributes classname and name that pytest gives a test."""
    path, bracket, parameters = test.partition("[")
    file, *names = path.split("::")
    classes = [file.removesuffix(".py").replace("/", "."), *names[:-1]]
    return ".".join([prefix, *classes] if prefix else classes), names[-1] + bracket + parameters
