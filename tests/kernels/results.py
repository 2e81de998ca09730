"""Results of one kernel, read from the lines that the recorder wrote in the guest."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from tests.kernel import offers

# Kernel log lines of errors in the kernel itself, which no test reports.
_COMPLAINT = re.compile(r"\] (WARNING: |BUG: |Oops|general protection|INFO: task .* blocked|RIP: )")


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """`passed`, `failed` and `not_offered` name each test that ran once; names to reasons."""

    collected: int
    attachment: str
    passed: tuple[str, ...]
    failed: dict[str, str]
    not_offered: dict[str, str]
    unfinished: str = ""
    """The test in which the guest hung, died or was stopped."""
    complaints: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every test that was collected came to a result."""
        ran = len(self.passed) + len(self.failed) + len(self.not_offered)
        return ran == self.collected > 0


def read(exchange: pathlib.Path) -> Results:
    """The results that lie in a guest's exchange folder, however far it came."""
    lines = _text(exchange / "results.jsonl").splitlines()
    complaints = [
        line.split("] ", 1)[1]
        for line in _text(exchange / "dmesg.txt").splitlines()
        if _COMPLAINT.search(line)
    ]
    results = summarise(json.loads(line) for line in lines)
    return dataclasses.replace(results, complaints=tuple(dict.fromkeys(complaints)))


def summarise(events: Iterable[dict[str, Any]]) -> Results:
    """One outcome per test: the worst of its set-up, its call and its tear-down.

    A skip that names no missing kernel feature is a failure: no test is skipped silently.
    """
    collected, attachment = 0, "unknown"
    passed: dict[str, None] = {}
    failed: dict[str, str] = {}
    not_offered: dict[str, str] = {}
    running = ""
    for event in events:
        if event["event"] == "collected":
            collected, attachment = event["tests"], event["attachment"]
            continue
        test = event["test"]
        if event["event"] == "start":
            running = test
            continue
        reason = str(event["reason"])
        if event["outcome"] == "failed":
            failed.setdefault(test, reason)
        elif event["outcome"] == "skipped":
            if reason.startswith(offers.NOT_OFFERED):
                not_offered[test] = reason.removeprefix(offers.NOT_OFFERED)
            else:
                failed.setdefault(test, f"skipped: {reason}")
        elif event["event"] == "call":
            passed[test] = None
        if event["event"] == "teardown":
            running = ""
    if running:
        passed.pop(running, None)
    names = tuple(test for test in passed if test not in failed)
    return Results(collected, attachment, names, failed, not_offered, running)


def _text(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
