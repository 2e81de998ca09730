"""A pytest plugin: records which test files run which lines, how long they take, and what fails.

Coverage's context is the test file; processes that a test starts inherit it in the environment.
"""

import json
import os
import pathlib
from collections import defaultdict
from collections.abc import Iterator

import coverage
import pytest

RECORD = "PODGATE_MUTANTS_RECORD"
"""The variable with the file that gets durations and failures."""
CONTEXT = "PODGATE_MUTANTS_CONTEXT"
"""The variable with the test file, for coverage in processes that a test starts."""

_seconds: defaultdict[str, float] = defaultdict(float)
_failed: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measured = coverage.Coverage.current()
    assert measured is not None
    path = item.nodeid.partition("::")[0]
    measured.switch_context(path)
    os.environ[CONTEXT] = path
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration
    if report.failed:
        _failed.append(report.nodeid)


def pytest_sessionfinish() -> None:
    content = {"seconds": dict(_seconds), "failed": sorted({*_failed})}
    pathlib.Path(os.environ[RECORD]).write_text(json.dumps(content))
