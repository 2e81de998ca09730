"""Results of one kernel over any number of boots, from the lines that guests recorded."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tests.kernel import offers

# Kernel log lines of errors in the kernel itself, which no test reports.
_COMPLAINT = re.compile(r"\] (WARNING: |BUG: |Oops|general protection|INFO: task .* blocked|RIP: )")


@dataclasses.dataclass(slots=True)
class FileResults:
    """The last run of a test file: `passed`, `failed` and `not_offered` name each test that ran
    once; names to reasons.
    """

    collected: int
    commit: str
    passed: dict[str, None] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    not_offered: dict[str, str] = dataclasses.field(default_factory=dict)
    running: set[str] = dataclasses.field(default_factory=set)
    """Tests without an end: the guest hung, died or was stopped there, or still runs."""

    @property
    def is_complete(self) -> bool:
        """Whether every test that was collected came to a result."""
        ran = len(self.passed) + len(self.failed) + len(self.not_offered)
        return ran == self.collected and not self.running


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """All files that ever were started on the kernel."""

    files: Mapping[str, FileResults]
    attachment: str
    release: str
    package: str
    complaints: tuple[str, ...] = ()

    @property
    def complete(self) -> frozenset[str]:
        return frozenset(name for name, file in self.files.items() if file.is_complete)


def read(exchange: pathlib.Path) -> Results:
    """The results that lie in a guest's exchange folder, however far it came."""
    lines = _text(exchange / "results.jsonl").splitlines()
    complaints = [
        line.split("] ", 1)[1]
        for line in _text(exchange / "dmesg.txt").splitlines()
        if _COMPLAINT.search(line)
    ]
    results = summarise(event for line in lines if (event := _decoded(line)))
    return dataclasses.replace(results, complaints=tuple(dict.fromkeys(complaints)))


def summarise(events: Iterable[dict[str, Any]]) -> Results:
    """One outcome per test: the worst of its set-up, its call and its tear-down.

    A skip that names no missing kernel feature is a failure: no test is skipped silently. Results
    of a file replace those of its earlier runs as soon as its first test starts again.
    """
    attachment = release = package = commit = "unknown"
    files: dict[str, FileResults] = {}
    expected: dict[str, int] = {}
    for event in events:
        if event["event"] == "boot":
            release, package, commit = event["release"], event["package"], event["commit"]
            expected = {}
        elif event["event"] == "collected":
            expected, attachment = dict(event["files"]), event["attachment"]
        else:
            name = file_of(event["test"])
            if name in expected:
                files[name] = FileResults(expected.pop(name), commit)
            if name in files:
                _add(files[name], event)
    return Results(files, attachment, release, package)


def file_of(test: str) -> str:
    """The path of the file that contains the test, from its node id."""
    return test.partition("::")[0]


def shortened(reason: str) -> str:
    """The first line, without parts that differ between tests or would end Markdown's code."""
    first = reason.strip().splitlines()[0] if reason.strip() else "no message"
    first = re.sub(r"\b0x[0-9a-f]{8,}|(?<=interface )\d+", "…", first).replace("`", "'")
    return first[:160]


def _add(file: FileResults, event: dict[str, Any]) -> None:
    test = event["test"]
    if event["event"] == "start":
        file.running.add(test)
        return
    # Set-ups and tear-downs that passed are not reported (tests/reports.py).
    file.running.discard(test)
    reason = str(event["reason"])
    if event["outcome"] == "failed":
        file.failed.setdefault(test, reason)
        file.passed.pop(test, None)
    elif event["outcome"] == "skipped":
        if reason.startswith(offers.NOT_OFFERED):
            file.not_offered[test] = reason.removeprefix(offers.NOT_OFFERED)
        else:
            file.failed.setdefault(test, f"skipped: {reason}")
    elif event["event"] == "call" and test not in (file.failed | file.not_offered):
        file.passed[test] = None


def _decoded(line: str) -> dict[str, Any] | None:
    """Nothing for a line that a dying guest did not finish."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event


def _text(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
