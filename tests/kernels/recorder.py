"""A pytest plugin for inside the guest: each result is a JSON line in /exchange, as it comes.

Lines instead of one report at the end, so that a guest that dies or hangs has recorded its results
and the tests that were running. Only pytest-xdist's main process writes: it has all reports.
"""

import json
import os
import pathlib
from collections import Counter
from typing import Any

import pytest

from bpf import tcx
from tests.kernel import offers
from tests.kernels import results

_RESULTS = pathlib.Path(os.environ.get("PODGATE_MATRIX_RESULTS", "/exchange/results.jsonl"))


class _Recorder:
    def __init__(self) -> None:
        self._is_collected = False

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if self._is_collected:  # all workers collect the same
            return
        self._is_collected = True
        attachment = "tcx" if tcx.TcxLinks.is_supported() else "clsact"
        _write(event="collected", files=Counter(map(results.file_of, ids)), attachment=attachment)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _write(event="start", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        reason = ""
        if hasattr(report, "wasxfail"):  # a backend that cannot, by the table of docs/proxy.md
            reason = offers.NOT_OFFERED + report.wasxfail.removeprefix("reason: ")
        elif isinstance(report.longrepr, tuple):
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


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


def _write(**fields: Any) -> None:
    with _RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")
