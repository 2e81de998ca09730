"""Paths of an installation, and what is said when there can be none."""

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
    """bpffs refuses them with EPERM."""
    installation = pins.Pins("/bpffs")
    names = [installation.map(spec) for spec in abi.MAPS]
    names += [installation.link(program, 1) for program in abi.PROGRAMS]
    assert not [name for name in names if "." in name]


def test_directory_of_another_file_system_is_refused(tmp_path: pathlib.Path) -> None:
    assert not pins.is_bpffs(tmp_path)
    with pytest.raises(errors.PinError) as caught:
        pins.Pins(tmp_path).prepare()
    assert str(caught.value) == (
        f"{tmp_path} is not a BPF file system; mount one with 'mount -t bpf bpf {tmp_path}' or "
        "name another with --bpffs"
    )
    assert list(tmp_path.iterdir()) == []


def test_directory_that_is_not_there_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.PinError, match="is not a BPF file system"):
        pins.Pins(tmp_path / "none").prepare()


def test_linked_interfaces_are_read_from_the_names(tmp_path: pathlib.Path) -> None:
    installation = pins.Pins(tmp_path)
    installation.links.mkdir(parents=True)
    for name in ("gate_egress-12", "gate_egress-3", "gate_ingress-5", "gate_egress-x", "other"):
        (installation.links / name).touch()
    assert installation.linked_ifindexes("gate_egress") == [3, 12]


def test_other_programs_are_discarded(tmp_path: pathlib.Path) -> None:
    installation = pins.Pins(tmp_path)
    for name in ("new", "old", "new-unfinished"):
        (installation.programs / name).mkdir(parents=True)
        (installation.programs / name / "gate_egress").touch()
    installation.discard_other_programs("new")
    assert [path.name for path in installation.programs.iterdir()] == ["new"]


def test_everything_is_removed_of_every_schema(tmp_path: pathlib.Path) -> None:
    installation = pins.Pins(tmp_path)
    for schema in ("v1", "v99"):
        (installation.root / schema / "maps").mkdir(parents=True)
        (installation.root / schema / "maps" / "gates").touch()
    (tmp_path / "foreign").touch()
    assert installation.remove_everything() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]
    assert installation.remove_everything() == 0


def test_pinned_maps_are_not_asked_for_where_none_is(tmp_path: pathlib.Path) -> None:
    maps.check_pinned(pins.Pins(tmp_path))
