"""Why pinned objects cannot be read, as one sentence."""

import os
import pathlib

import pytest

from agent.operate.pinned.installation import PinsUnreadableError, opened
from bpf import abi, errors, loader, pins


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


class Maps:
    """Maps that are open until `close`."""

    is_open = True

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def pinned(tmp_path: pathlib.Path) -> pathlib.Path:
    """A bpffs with an object of this version."""
    (pins.Pins(tmp_path).maps / "gates").mkdir(parents=True)
    return tmp_path


def test_maps_are_open_for_the_block(pinned: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = Maps()
    monkeypatch.setattr(loader, "open_maps", lambda _: maps)
    with opened(pins.Pins(pinned)):
        is_open = [maps.is_open]
    assert [*is_open, maps.is_open] == [True, False]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.PinError("x"), "are of another version of podgate (x)"),
        (errors.BpfError("x"), "cannot be read (x)"),
        (errors.BpfError(1, "Operation not permitted"), "cannot be read (Operation not permitted)"),
        (
            ValueError("9 is no mode"),
            "have a value that this version does not know (9 is no mode); use the podgate command "
            "of the version that wrote it.",
        ),
    ],
)
def test_maps_that_cannot_be_read_are_one_sentence(
    pinned: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    maps = Maps()
    monkeypatch.setattr(loader, "open_maps", lambda _: maps)
    expected = f"the maps below {pins.Pins(pinned).maps} {words}"
    with pytest.raises(PinsUnreadableError) as found, opened(pins.Pins(pinned)):
        raise error
    assert str(found.value) == expected
    assert not maps.is_open

    def fail(_: pins.Pins) -> None:
        raise error

    monkeypatch.setattr(loader, "open_maps", fail)
    assert problem(pinned) == expected


def test_directory_of_root_needs_root(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(_: pathlib.Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", deny)
    expected = f"{tmp_path}/podgate belongs to root; run the command as root."
    assert problem(tmp_path) == expected
