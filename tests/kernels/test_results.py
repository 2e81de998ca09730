"""Results over several boots: passed, failed, not offered; the page keeps other kernels."""

import json
import pathlib
from typing import Any

from tests.kernel import offers
from tests.kernels import record, report, results

BOOT = {"event": "boot", "release": "6.1.0", "package": "6.1.9-1 (bookworm)", "commit": "abc"}


def event(kind: str, test: str, outcome: str = "passed", reason: str = "") -> dict[str, Any]:
    return {"event": kind, "test": test, "outcome": outcome, "reason": reason}


def collected(**files: int) -> dict[str, Any]:
    return {"event": "collected", "files": files, "attachment": "clsact"}


def ran(test: str, call: str = "passed", reason: str = "") -> list[dict[str, Any]]:
    """As tests/reports.py has it: no set-up and no tear-down that passed."""
    return [{"event": "start", "test": test}, event("call", test, call, reason)]


def test_skip_for_a_missing_feature_is_no_failure_and_any_other_skip_is() -> None:
    found = results.summarise(
        [
            BOOT,
            collected(f=3),
            *ran("f::a"),
            *ran("f::b", "skipped", offers.NOT_OFFERED + "tcx"),
            *ran("f::c", "skipped", "did not feel like it"),
        ]
    )
    assert list(found.files["f"].passed) == ["f::a"]
    assert found.files["f"].not_offered == {"f::b": "tcx"}
    assert found.files["f"].failed == {"f::c": "skipped: did not feel like it"}
    assert found.complete == {"f"}


def test_failed_setup_and_failed_teardown_are_failures() -> None:
    setup = [{"event": "start", "test": "f::a"}, event("setup", "f::a", "failed", "nothing there")]
    teardown = [*ran("f::b"), event("teardown", "f::b", "failed", "left something")]
    found = results.summarise([BOOT, collected(f=2), *setup, *teardown])
    assert not found.files["f"].passed
    assert found.files["f"].failed == {"f::a": "nothing there", "f::b": "left something"}
    assert found.complete == {"f"}


def test_worker_that_crashes_fails_its_test() -> None:
    crash = [{"event": "start", "test": "f::a"}, event("???", "f::a", "failed", "worker crashed")]
    found = results.summarise([BOOT, collected(f=1), *crash])
    assert found.files["f"].failed == {"f::a": "worker crashed"}
    assert found.complete == {"f"}


def test_file_in_which_the_guest_ended_is_not_complete_and_names_its_tests() -> None:
    found = results.summarise([BOOT, collected(f=3, g=1), *ran("f::a"), *ran("f::b")[:1]])
    assert found.files["f"].running == {"f::b"}
    assert not found.complete


def test_results_of_a_file_replace_those_of_its_last_run() -> None:
    first = [
        BOOT,
        collected(f=2, g=1),
        *ran("f::a", "failed", "no"),
        *ran("f::b")[:1],
        *ran("g::a"),
    ]
    second = [BOOT | {"commit": "def"}, collected(f=1, g=1), *ran("f::a")]
    found = results.summarise([*first, *second])
    assert found.complete == {"f", "g"}
    assert not found.files["f"].failed
    assert [found.files[name].commit for name in ("f", "g")] == ["def", "abc"]


def test_line_that_a_dying_guest_did_not_finish_is_left_out(tmp_path: pathlib.Path) -> None:
    lines = [json.dumps(line) for line in (BOOT, collected(f=1), *ran("f::a"))]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    assert not results.read(tmp_path).complete
    path.write_text("\n".join([*lines[:-1], lines[-1][:20], *lines]))
    assert results.read(tmp_path).complete == {"f"}


def test_record_continues_on_another_machine(tmp_path: pathlib.Path) -> None:
    there = results.summarise(
        [BOOT, collected(f=2, g=1), *ran("f::a", "failed", "no"), *ran("f::b")]
    )
    record.write("6.1 with systemd", record.Record().updated(there), tmp_path)
    kept = record.read("6.1 with systemd", tmp_path)
    assert kept.files == {"f": record.FileRecord("abc", passed=1, failed={"f::a": "no"})}
    here = results.summarise([BOOT | {"commit": "def"}, collected(f=1), *ran("f::a")])
    assert kept.updated(here).files == {"f": record.FileRecord("def", passed=1)}


def test_boot_without_a_whole_file_leaves_the_record_as_it_is(tmp_path: pathlib.Path) -> None:
    died = results.summarise([BOOT | {"release": "6.12"}, collected(f=1), *ran("f::a")[:1]])
    kept = record.Record("6.1.0", files={"f": record.FileRecord("abc", passed=1)})
    assert kept.updated(died) == kept
    assert record.read("6.12", tmp_path) == record.Record()


def test_page_keeps_the_sections_of_other_kernels() -> None:
    events = [
        BOOT,
        collected(**{"tests/f.py": 2, "tests/g.py": 1}),
        *ran("tests/f.py::a", "failed", "went `wrong`\nbadly"),
        *ran("tests/f.py::b", "skipped", offers.NOT_OFFERED + "tcx"),
    ]
    found = results.summarise(events)
    new = report.section("6.12", record.Record().updated(found), ["tests/f.py", "tests/g.py"])
    old = report.section("5.10", record.Record().updated(found), ["tests/f.py"])
    page = report.render({"6.12": new, "5.10": old})
    assert report.render(report.read(page)) == page
    assert page.index("## 5.10") < page.index("## 6.12")
    assert "1 of 2 files ran to their end, 2 tests, of which 0 passed, 1 lack" in new
    assert "| tcx | 1 |" in new
    assert "| tests/f.py | 0 | 1 | 1 | abc |" in new
    assert "Not run to the end: tests/g.py." in new
    assert "Failed, `went 'wrong'`:\n\n* `tests/f.py::a`" in report.protocol("6.12", found)
