"""Plugin of pytest: of a test that passes, a worker reports its start and its call.

xdist sends six messages for each test, and takes as long for them as pytest for an empty test.
Three of them are its setup, its teardown and its end.
"""

from collections.abc import Sequence

import pytest
from _pytest import runner


def needed(config: pytest.Config, reports: Sequence[pytest.TestReport]) -> list[pytest.TestReport]:
    """Those of a test's reports from which the run prints or records something."""
    option = config.option
    is_all = (
        not hasattr(config, "workerinput")
        or option.durations is not None
        or option.record_durations
        or not all(report.passed for report in reports)
    )
    return [one for one in reports if is_all or one.when == "call" or one.sections]


def send(item: pytest.Item, reports: Sequence[pytest.TestReport]) -> None:
    for report in needed(item.config, reports):
        item.ihook.pytest_runtest_logreport(report=report)
    if not hasattr(item.config, "workerinput"):
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


@pytest.hookimpl
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not hasattr(item.config, "workerinput"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    send(item, runner.runtestprotocol(item, log=False, nextitem=nextitem))
    return True
