"""docs/compatibility.md has what recorded runs show, and nothing else."""

import pathlib
from collections.abc import Iterator

import msgspec
import pytest

from tests.compatibility import cells, page, runs, tables
from tests.networks import records
from tests.networks.records import Record, Row


def row(mode: str, result: str = "passed", **others: str) -> Row:
    fields = {
        **{"subject": "connects", "figures": "", "date": "2026-11-20", "podgate": "0.1.0"},
        **{"revision": "abc", "version": "3.33", "kubernetes": "v1.36.2", "kernel": "6.18.44"},
        **others,
    }
    return Row(mode=mode, result=result, **fields)


@pytest.fixture
def recorded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    runs._record.cache_clear()
    yield tmp_path
    runs._record.cache_clear()


def write(directory: pathlib.Path, network: str, *rows: Row) -> None:
    content = msgspec.json.encode(Record(network, list(rows)))
    (directory / f"{network}.json").write_bytes(content)


def version(one: Row) -> str:
    return one.version


def found(title: str, name: str) -> list[str]:
    (table,) = [one for one in tables.all_tables() if one.title == title]
    return list(dict(table.rows)[name])


def test_committed_page_is_current() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), "run: make docs"


def test_cells_have_one_of_three_contents() -> None:
    for table in tables.all_tables():
        for name, row_cells in table.rows:
            assert len(row_cells) == len(table.columns), name
            assert [one for one in row_cells if not cells.is_cell(one)] == [], name


def test_newest_run_of_a_mode_counts(recorded: pathlib.Path) -> None:
    newer = row("strict", date="2026-11-25", version="3.34")
    write(recorded, "calico-ebpf", row("strict"), newer, row("audit"))
    assert found("Network and mode", "Calico, eBPF") == [
        "tried 2026-11-20 3.33",
        cells.NOT_TRIED,
        "tried 2026-11-25 3.34",
    ]


def test_failed_run_is_named_by_its_test(recorded: pathlib.Path) -> None:
    write(recorded, "calico-ebpf", row("strict"), row("strict", "failed", subject="probes hold"))
    (*_, strict) = found("Network and mode", "Calico, eBPF")
    assert strict == "refused, because 'probes hold' failed on 2026-11-20"


def test_version_is_no_prefix_of_another_one(recorded: pathlib.Path) -> None:
    write(recorded, "ptp", row("strict", runtime="containerd 1.60.1"))
    assert found("Container runtime and mode", "containerd 1.6") == [cells.NOT_TRIED] * 3
    write(recorded, "ptp", row("strict", runtime="containerd 1.6.20"))
    runs._record.cache_clear()
    assert found("Container runtime and mode", "containerd 1.6")[-1] == (
        "tried 2026-11-20 containerd 1.6.20"
    )


def test_kernel_of_a_cluster_is_a_row_of_kernels(recorded: pathlib.Path) -> None:
    write(recorded, "ptp", row("strict"))
    assert found("Kernel", "6.18") == [cells.NOT_TRIED, "tried 2026-11-20 6.18.44"]


def test_cell_without_a_version_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks"):
        cells.tried("2026-11-20", "")


def test_rows_without_a_mode_are_in_no_cell() -> None:
    assert runs.by_mode([row("", "failed")], version) == [cells.NOT_TRIED] * 3
