"""Paths of an installation, and the errors where pinning is impossible."""

import os
import pathlib

import pytest

from bpf import abi, errors, maps, pins


def test_schema_is_part_of_every_path() -> None:
    installation = pins.Pins("/sys/fs/bpf")
    below = f"/sys/fs/bpf/podgate/v{abi.SCHEMA}"
    assert installation.map(abi.GATES) == f"{below}/maps/gates"
    assert installation.link("gate_egress", 7) == f"{below}/links/gate_egress-7"
    assert str(installation.programs) == f"{below}/progs"


def test_default_is_where_every_distribution_mounts_it() -> None:
    assert pins.Pins().bpffs == pathlib.Path("/sys/fs/bpf")


def test_names_of_pins_have_no_dot() -> None:
    """bpffs rejects them with EPERM."""
    installation = pins.Pins("/bpffs")
    names = [installation.map(spec) for spec in abi.MAPS]
    names += [installation.link(program, 1) for program in abi.PROGRAMS]
    assert not [name for name in names if "." in name]


def test_directory_of_another_file_system_is_an_error(tmp_path: pathlib.Path) -> None:
    assert not pins.is_bpffs(tmp_path)
    with pytest.raises(errors.PinError) as caught:
        pins.Pins(tmp_path).prepare()
    assert str(caught.value) == (
        f"{tmp_path} is not a BPF file system; mount one with 'mount -t bpf bpf {tmp_path}' or "
        "name another with --bpffs"
    )
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.PinError, match="is not a BPF file system"):
        pins.Pins(tmp_path / "none").prepare()


def test_linked_interfaces_are_read_from_the_names(tmp_path: pathlib.Path) -> None:
    installation = pins.Pins(tmp_path)
    installation.links.mkdir(parents=True)
    names = ["gate_egress-12", "gate_egress-3", "gate_ingress-5", "gate_egress-x", "other"]
    for name in (*names, "gate_egress-3-moving", "gate_egress-40-moving", "gate_egress-5-other"):
        (installation.links / name).touch()
    assert installation.linked_ifindexes("gate_egress") == [3, 12, 40]


def test_other_schemas_are_found_newest_first(tmp_path: pathlib.Path) -> None:
    installation = pins.Pins(tmp_path, schema=3)
    for name in ("v1", "v3", "v10", "v2", "vx", "other"):
        (installation.root / name).mkdir(parents=True)
    assert [path.name for path in installation.other_schemas()] == ["v10", "v2", "v1"]
    assert pins.Pins(tmp_path / "nothing").other_schemas() == []


def test_link_is_found_under_every_schema_and_adopted(tmp_path: pathlib.Path) -> None:
    first, second = (pins.Pins(tmp_path, schema) for schema in (1, 2))
    for installation in (first, second):
        installation.links.mkdir(parents=True)
        (installation.links / "hook").write_text(installation.schema.name)
    assert second.find_links("hook") == [second.links / "hook", first.links / "hook"]
    assert second.find_links("none") == []
    second.adopt(first.links / "hook", "hook")
    assert second.find_links("hook") == [second.links / "hook"]
    assert (second.links / "hook").read_text() == "v1"


def test_links_of_a_schema_without_any_are_none(tmp_path: pathlib.Path) -> None:
    installation = pins.Pins(tmp_path)
    (installation.root / "v99").mkdir(parents=True)
    (other,) = installation.other_schemas()
    assert installation.linked_ifindexes("gate_egress", other) == []
    installation.discard_schema(other)
    assert installation.other_schemas() == []


def test_other_programs_are_discarded(tmp_path: pathlib.Path) -> None:
    installation = pins.Pins(tmp_path)
    unfinished = ("new-unfinished", "new-moving-unfinished")
    for name in ("new", "new-moving", "old", "old-moving", *unfinished):
        (installation.programs / name).mkdir(parents=True)
        (installation.programs / name / "gate_egress").touch()
    installation.discard_other_programs("new")
    assert {path.name for path in installation.programs.iterdir()} == {"new", "new-moving"}


def test_everything_is_removed_of_every_schema(tmp_path: pathlib.Path) -> None:
    installation = pins.Pins(tmp_path)
    for schema in ("v1", "v99"):
        (installation.root / schema / "maps").mkdir(parents=True)
        (installation.root / schema / "maps" / "gates").touch()
    (tmp_path / "foreign").touch()
    assert installation.remove_everything() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]
    assert installation.remove_everything() == 0


def test_pins_that_a_compile_process_adds_meanwhile_are_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation = pins.Pins(tmp_path)
    installation.programs.mkdir(parents=True)
    late = installation.programs / "hash-unfinished"
    compiling = [late]
    rmdir = os.rmdir

    def add_then_remove(path: str) -> None:
        if path == str(installation.schema) and compiling:
            compiling.pop().mkdir(parents=True)
            (late / "gate_egress").touch()
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", add_then_remove)
    assert installation.remove_everything() == 1
    assert list(tmp_path.iterdir()) == []


def test_check_of_pinned_maps_passes_without_pins(tmp_path: pathlib.Path) -> None:
    maps.check_pinned(pins.Pins(tmp_path))
