"""The record of runs beside meshes, and its page."""

import pathlib

from tests.meshes import record
from tests.meshes.record import Gap, Run

OLD = Run(
    date="2026-11-01",
    podgate="11111111",
    kernel="6.12",
    programs={"envoy": "1.39.0"},
    results={"none": {"http": "wrong (reset)"}, "strict": {"http": "right"}},
)
NEW = Run(
    date="2026-11-26",
    podgate="22222222",
    kernel="6.18",
    programs={"envoy": "1.40.0"},
    gaps={"relay killed": Gap(100, 20, 0.4), "agent killed": Gap(200, 0, 0.0)},
)


def test_page_is_made_of_the_record() -> None:
    assert record.PAGE.read_text(encoding="utf-8") == record.text(record.read())


def test_newer_run_leaves_what_it_has_not_tried() -> None:
    merged = record.merged({"consul": {record.PROBES: OLD}}, {"consul": {record.GAPS: NEW}})
    merged = record.merged(merged, {"linkerd": {record.PROBES: OLD}})
    assert merged == {
        "consul": {record.PROBES: OLD, record.GAPS: NEW},
        "linkerd": {record.PROBES: OLD},
    }


def test_section_shows_results_by_mode_and_gaps_by_event(tmp_path: pathlib.Path) -> None:
    made = {"consul": {record.PROBES: OLD, record.GAPS: NEW}}
    file, page = tmp_path / "recorded.json", tmp_path / "page.md"
    record.write(made, file, page)
    assert record.read(file) == made
    lines = page.read_text(encoding="utf-8").splitlines()
    assert "2026-11-01, podgate 11111111, Linux 6.12; envoy 1.39.0." in lines
    assert "| http | wrong (reset) | right |" in lines
    assert "2026-11-26, podgate 22222222, Linux 6.18; envoy 1.40.0." in lines
    assert "| relay killed | 100 | 20 | 0.40 s |" in lines
    assert "| agent killed | 200 | 0 |  |" in lines
