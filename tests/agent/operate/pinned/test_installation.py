"""Why pinned objects cannot be read, as one sentence."""

import pathlib

import pytest

from agent.operate.pinned.installation import PinsUnreadableError, opened
from bpf import abi, pins


def problem(bpffs: pathlib.Path) -> str:
    with pytest.raises(PinsUnreadableError) as found, opened(pins.Pins(bpffs)):
        pass
    return str(found.value)


def test_node_without_pins_has_no_gate(tmp_path: pathlib.Path) -> None:
    expected = f"nothing is pinned below {tmp_path}/podgate: no pod of this node has a gate."
    assert problem(tmp_path) == expected
    pins.Pins(tmp_path).maps.mkdir(parents=True)
    assert problem(tmp_path) == expected


def test_pins_of_other_versions_are_named_the_newest_first(tmp_path: pathlib.Path) -> None:
    for schema in (2, 900):
        (tmp_path / "podgate" / f"v{schema}").mkdir(parents=True)
    found = problem(tmp_path)
    assert f"(schema v900, v2; this one reads v{abi.SCHEMA})" in found
    assert found.endswith("use the podgate command of that version.")


def test_directory_that_cannot_be_read_has_the_reason(tmp_path: pathlib.Path) -> None:
    maps = pins.Pins(tmp_path).maps
    maps.parent.mkdir(parents=True)
    maps.write_text("", encoding="utf-8")
    assert problem(tmp_path) == f"{maps} cannot be read (Not a directory)."
