"""Results of a run: passed, failed, not offered; the page keeps the rows of other kernels."""

from typing import Any

from tests.kernel import offers
from tests.kernels import report, results


def event(kind: str, test: str, outcome: str = "passed", reason: str = "") -> dict[str, Any]:
    return {"event": kind, "test": test, "outcome": outcome, "reason": reason}


def collected(tests: int) -> dict[str, Any]:
    return {"event": "collected", "tests": tests, "attachment": "clsact"}


def ran(test: str, call: str = "passed", reason: str = "") -> list[dict[str, Any]]:
    return [
        {"event": "start", "test": test},
        event("setup", test),
        event("call", test, call, reason),
        event("teardown", test),
    ]


def test_skip_for_a_missing_feature_is_no_failure_and_any_other_skip_is() -> None:
    found = results.summarise(
        [
            collected(3),
            *ran("a"),
            *ran("b", "skipped", offers.NOT_OFFERED + "tcx"),
            *ran("c", "skipped", "did not feel like it"),
        ]
    )
    assert found.passed == ("a",)
    assert found.not_offered == {"b": "tcx"}
    assert found.failed == {"c": "skipped: did not feel like it"}
    assert found.is_complete


def test_failed_teardown_is_a_failure() -> None:
    events = [*ran("a")[:-1], event("teardown", "a", "failed", "left something")]
    found = results.summarise([collected(1), *events])
    assert found.passed == ()
    assert found.failed == {"a": "left something"}


def test_guest_that_hangs_names_its_last_test() -> None:
    found = results.summarise([collected(3), *ran("a"), *ran("b")[:2]])
    assert found.unfinished == "b"
    assert not found.is_complete


def test_page_keeps_the_rows_of_other_kernels() -> None:
    found = results.summarise([collected(1), *ran("a", "failed", "went `wrong`\nbadly")])
    entry = report.entry_of_run(
        title="6.1",
        release="6.1.0",
        package="6.1.9-1",
        commit="abc",
        seconds=9.6,
        found=found,
        remark="",
    )
    other = report.entry_not_to_be_had("5.10", "bullseye: no mirror")
    some = report.title("6.1", ["tests/kernel/test_strict.py", "tests/kernel/test_redirect.py"])
    part = report.entry_not_to_be_had(some, "bookworm: no mirror")
    page = report.render({some: part.row, "6.1": entry.row, "5.10": other.row})
    assert report.read(page) == {"6.1": entry.row, "5.10": other.row, some: part.row}
    rows = [page.index(f"| {row} |") for row in ("5.10", "6.1", "6.1 (redirect, strict)")]
    assert rows == sorted(rows)
    assert "Failed, `went 'wrong'`:\n\n* `a`" in entry.protocol
