"""What a run records, and the page that is made of it."""

import pathlib
from types import SimpleNamespace
from typing import cast

import pytest

from tests.compatibility import page as compatibility
from tests.networks import conftest, records
from tests.networks.records import FIGURES, Run


@pytest.fixture(autouse=True)
def recorded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(records, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(records, "PAGE", tmp_path / "networks.md")
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "compatibility.md")
    return tmp_path


def report(name: str, outcome: str = "passed", when: str = "call", figures: str = "") -> object:
    properties = [(FIGURES, figures)] if figures else []
    nodeid = f"tests/networks/test_modes.py::{name}"
    fields = {"nodeid": nodeid, "when": when, "outcome": outcome, "user_properties": properties}
    return SimpleNamespace(failed=outcome == "failed", **fields)


def run(*reports: object, version: str = "3.33") -> None:
    made = Run()
    made.began("calico-ebpf", version, "v1.36.2")
    for one in reports:
        made.add(cast(pytest.TestReport, one))
    made.write()


def results() -> dict[tuple[str, str], tuple[str, str]]:
    rows = records.read("calico-ebpf").rows
    return {(row.subject, row.mode): (row.result, row.version) for row in rows}


def test_run_replaces_the_rows_of_its_own_tests() -> None:
    run(report("test_probes_hold[strict]"), report("test_storm"))
    run(report("test_storm", "failed"), version="3.34")
    assert results() == {
        ("probes hold", "strict"): ("passed", "3.33"),
        ("storm", ""): ("failed", "3.34"),
    }


def test_failed_fixture_is_a_failure() -> None:
    run(report("test_storm", "failed", when="setup"))
    assert results() == {("storm", ""): ("failed", "3.33")}


def test_page_has_figures_and_versions(recorded: pathlib.Path) -> None:
    run(report("test_storm", figures="node: 0 wrong of 12"))
    text = (recorded / "networks.md").read_text(encoding="utf-8")
    assert "## calico-ebpf" in text
    assert "| storm |  | passed | node: 0 wrong of 12 | " in text
    assert "Kubernetes v1.36.2" in text


def test_run_without_a_network_writes_nothing(recorded: pathlib.Path) -> None:
    made = Run()
    made.add(cast(pytest.TestReport, report("test_storm", "failed", when="setup")))
    made.write()
    assert list(recorded.iterdir()) == []


def test_committed_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert records.PAGE.read_text(encoding="utf-8") == records.page()


def test_result_of_a_second_run_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run()
    first.began("calico-ebpf", "3.33", "v1.36.2")
    first.add(cast(pytest.TestReport, report("test_storm", "failed")))
    monkeypatch.setattr(conftest, "_run", first)
    loop = conftest.pytest_runtestloop()
    next(loop)
    with pytest.raises(StopIteration):
        loop.send(None)
    run(report("test_storm"))
    assert results() == {("storm", ""): ("passed", "3.33")}
