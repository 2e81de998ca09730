"""A pytest plugin for inside the guest: each result is a JSON line in /exchange, as it comes.

Lines instead of one report at the end, so that a guest that dies or hangs has recorded its results
and the test that was running.
"""

import json
import os
import pathlib
from typing import Any

import pytest

from bpf import tcx

_RESULTS = pathlib.Path(os.environ.get("PODGATE_MATRIX_RESULTS", "/exchange/results.jsonl"))


# They start whole agents, each of which compiles: as long as all others together.
_LAST = ("test_agent", "test_demo")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem in _LAST)


def pytest_collection_finish(session: pytest.Session) -> None:
    attachment = "tcx" if tcx.TcxLinks.is_supported() else "clsact"
    _write(event="collected", tests=len(session.items), attachment=attachment)


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(event="start", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome: str = report.outcome
    reason = ""
    if isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    elif report.longrepr is not None:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
    _write(
        event=report.when,
        test=report.nodeid,
        outcome=outcome,
        seconds=round(report.duration, 3),
        reason=reason,
    )


def _write(**fields: Any) -> None:
    with _RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")
