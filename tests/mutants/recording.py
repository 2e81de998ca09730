"""A pytest plugin: records which tests run which lines, how long they take, and what fails.

Coverage's context is the test function, or the test file while it is imported, which makes its
tables of parameters. Processes that a test starts inherit it in the environment.
Kernel tests run without coverage: their agents end by SIGKILL. For them tests/mutants/hook records
functions, under the same name.
"""

import contextlib
import json
import os
import pathlib
from collections import defaultdict
from collections.abc import Generator, Iterator

import coverage
import pytest

RECORD = "PODGATE_MUTANTS_RECORD"
"""The variable with the file that gets durations and failures."""
CONTEXT = "PODGATE_MUTANTS_CONTEXT"
"""The variable with the test, for tests/mutants/hook in processes that a kernel test starts."""
ENTRIES = "PODGATE_MUTANTS_ENTRIES"
"""The variable with the file that gets a line for each function that a kernel test enters."""

_COVERAGE = "COVERAGE_PROCESS_CONFIG"  # for processes that a test starts

_seconds: defaultdict[str, float] = defaultdict(float)
_failed: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    if not isinstance(collector, pytest.Module):
        return (yield)
    with _context(collector.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with _context(_function(item.nodeid)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """What a file's tests share concerns all of them, and not only the first."""
    if fixturedef.scope == "function":
        return (yield)
    with _context(request.node.nodeid.partition("::")[0]):
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = _function(report.nodeid)
    for timed in (name, name.partition("::")[0]):
        _seconds[timed] += report.duration
    if report.failed:
        _failed.append(name)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The reports of xdist's workers arrive at the process that started them, too."""
    if hasattr(session.config, "workerinput"):
        return
    content = {"seconds": dict(_seconds), "failed": sorted({*_failed})}
    pathlib.Path(os.environ[RECORD]).write_text(json.dumps(content))


@contextlib.contextmanager
def _context(name: str) -> Iterator[None]:
    before = os.environ.get(CONTEXT, "")
    _switch(name)
    try:
        yield
    finally:
        _switch(before)


def _switch(name: str) -> None:
    if measured := coverage.Coverage.current():
        measured.switch_context(name)
        measured.config.context = name
        os.environ[_COVERAGE] = measured.config.serialize()
    os.environ[CONTEXT] = name


def _function(nodeid: str) -> str:
    """Without parameters: their text may be long, and all of them run the same lines or nearly."""
    return nodeid.partition("[")[0]
