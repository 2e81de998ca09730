"""A pytest plugin: records which tests run which lines, how long they take, and what fails.

Coverage's context is the test function; processes that a test starts inherit it in the environment.
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
"""The variable with the test, for coverage in processes that a test starts."""

_seconds: defaultdict[str, float] = defaultdict(float)
_failed: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measured = coverage.Coverage.current()
    assert measured is not None
    name = _function(item.nodeid)
    measured.switch_context(name)
    os.environ[CONTEXT] = name
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = _function(report.nodeid)
    _seconds[name] += report.duration
    if report.failed:
        _failed.append(name)


def pytest_sessionfinish() -> None:
    content = {"seconds": dict(_seconds), "failed": sorted({*_failed})}
    pathlib.Path(os.environ[RECORD]).write_text(json.dumps(content))


def _function(nodeid: str) -> str:
    """Without parameters: their text may be long, and all of them run the same lines or nearly."""
    return nodeid.partition("[")[0]
