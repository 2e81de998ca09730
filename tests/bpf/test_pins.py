"""Paths of an installation, and the errors where pinning is impossible."""

import ctypes
import errno
import os
import pathlib
import stat
from types import SimpleNamespace

import pytest

from bpf import abi, errors, map_specs, maps, pins, program_specs


def test_schema_is_part_of_every_path() -> None:
    installation = pins.Pins("/sys/fs/bpf")
    below = f"/sys/fs/bpf/podgate/v{abi.SCHEMA}"
    assert installation.map(map_specs.GATES) == f"{below}/maps/gates"
    assert installation.link("gate_egress", 7) == f"{below}/links/gate_egress-7"
    assert str(installation.programs) == f"{below}/progs"


def test_each_map_that_is_pinned_is_checked_and_closed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation = pins.Pins(tmp_path)
    maps.check_pinned(installation)
    installation.maps.mkdir(parents=True)
    present = [map_specs.GATES, map_specs.COUNTERS]
    for spec in present:
        pathlib.Path(installation.map(spec)).touch()
    opened: list[tuple[str, map_specs.MapSpec]] = []

    def open_map(path: str, spec: map_specs.MapSpec) -> maps.Map:
        opened.append((path, spec))
        if spec == refused:
            raise errors.PinError("it is another map")
        return maps.Map(os.open(path, os.O_RDONLY), spec)

    monkeypatch.setattr(maps.Map, "open", open_map)
    before = os.listdir("/proc/self/fd")
    refused: map_specs.MapSpec | None = None
    maps.check_pinned(installation)
    assert opened == [(installation.map(spec), spec) for spec in present]
    assert os.listdir("/proc/self/fd") == before
    refused = map_specs.COUNTERS
    with pytest.raises(errors.PinError, match="it is another map"):
        maps.check_pinned(installation)


def test_default_is_where_every_distribution_mounts_it() -> None:
    assert pins.Pins().bpffs == pathlib.Path("/sys/fs/bpf")


def test_names_of_pins_have_no_dot() -> None:
    """bpffs rejects them with EPERM."""
    installation = pins.Pins("/bpffs")
    names = [installation.map(spec) for spec in map_specs.MAPS]
    names += [installation.link(program, 1) for program in program_specs.PROGRAMS]
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


@pytest.mark.parametrize(
    ("result", "magic", "is_one"),
    [
        (0, 0xCAFE4A11, True),
        # As a number with a sign.
        (0, 0xCAFE4A11 - (1 << 32), True),
        (0, 0xCAFE4A10, False),
        (0, 0x01021994, False),
        (-1, 0xCAFE4A11, False),
    ],
)
def test_file_system_counts_by_its_magic_number(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    result: int,
    magic: int,
    is_one: bool,
) -> None:
    def statfs(path: bytes, buffer: ctypes.Array[ctypes.c_char]) -> int:
        assert path == os.fsencode(tmp_path)
        ctypes.c_long.from_buffer(buffer).value = magic
        return result

    monkeypatch.setattr(pins, "_libc", SimpleNamespace(statfs=statfs))
    assert pins.is_bpffs(tmp_path) is is_one


def test_missing_directory_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.PinError, match="is not a BPF file system"):
        pins.Pins(tmp_path / "none").prepare()


@pytest.fixture
def installation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pins.Pins:
    """As if it were on a BPF file system."""
    monkeypatch.setattr(pins, "is_bpffs", lambda path: path == tmp_path)
    return pins.Pins(tmp_path)


def test_directories_are_only_for_root(installation: pins.Pins) -> None:
    """Also one that a previous version made for all users to enter."""
    for mode in (None, 0o755):
        if mode is not None:
            installation.root.chmod(mode)
        installation.prepare()
        assert stat.S_IMODE(installation.root.stat().st_mode) == 0o700
    made = installation.maps, installation.programs, installation.links
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    assert list(installation.bpffs.iterdir()) == [installation.root]


def test_link_in_the_place_of_the_directory_is_moved_aside(
    installation: pins.Pins, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    installation.root.symlink_to(elsewhere)
    installation.prepare()
    assert not installation.root.is_symlink()
    assert installation.maps.is_dir()
    assert list(elsewhere.iterdir()) == []
    (aside,) = (path for path in installation.bpffs.iterdir() if path != installation.root)
    assert aside.is_symlink()


def test_directory_that_cannot_be_claimed_is_an_error(
    installation: pins.Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user makes it again whenever it is moved aside."""

    def fail(source: object, target: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(errors.PinError, match="belongs to another user") as caught:
        installation.prepare()
    assert str(installation.root) in str(caught.value)
    assert list(installation.bpffs.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "is_tried_again"), [(errno.EBUSY, False), (errno.ENOTEMPTY, True)]
)
def test_directory_that_stays_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int, *, is_tried_again: bool
) -> None:
    """Only one that is filled meanwhile is tried again, and not without end."""
    installation = pins.Pins(tmp_path)
    installation.root.mkdir()
    tried = []

    def fail(path: str) -> None:
        tried.append(path)
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "rmdir", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        installation.remove_everything()
    assert (len(tried) > 1) is is_tried_again


def test_objects_are_removed_and_other_entries_stay(tmp_path: pathlib.Path) -> None:
    installation = pins.Pins(tmp_path)
    for name in ("v1/maps/gates", "v2/links/hook", "other/kept"):
        path = installation.root / name
        path.parent.mkdir(parents=True)
        path.touch()
    assert installation.remove_objects() == 2
    assert [path.name for path in installation.root.rglob("*")] == ["other", "kept"]


def test_file_that_is_gone_is_as_good_as_removed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pin").touch()
    for _ in range(2):
        pins.unlink_quietly(tmp_path / "pin")
    assert list(tmp_path.iterdir()) == []


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
