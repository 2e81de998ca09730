"""Where cgroup v2 is found."""

import errno
import os
import pathlib

import pytest

from agent.linux import cgroups
from agent.linux.cgroups import ancestors, cgroup2_mount, cgroup_paths, existing
from agent.linux.procfs import Procfs


def test_only_the_root_of_cgroups_counts(tmp_path: pathlib.Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"1 2 0:3 /part {tmp_path} rw shared:1 - cgroup2 cgroup2 rw\n"
        "1 2 0:3 / /nowhere rw shared:1 - cgroup2 cgroup2 rw\n"
        "1 2 0:4 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    )
    assert cgroup2_mount(mounts) is None


@pytest.mark.parametrize(
    ("fields", "rest", "is_found"),
    [
        ("1 2 0:3 / {} rw", " - cgroup2 none rw", True),
        ("1 2 0:3 / {} rw shared:1 master:2", " - cgroup2 cgroup rw", True),
        ("1 2 0:3 / {} rw", " - tmpfs cgroup2 rw", False),
        ("1 2 0:3 /sub {} rw", " - cgroup2 none rw", False),
        ("1 2 0:3 / {}x rw", " - cgroup2 none rw", False),
        # Lines that are cut off.
        ("1 2 0:3 /", " - cgroup2 none rw", False),
        ("1 2 0:3 / {} rw", "", False),
    ],
)
def test_mount_counts_by_its_type_and_root(
    tmp_path: pathlib.Path,
    fields: str,
    rest: str,
    is_found: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mounts").write_text(f"{fields.format(tmp_path)}{rest}\n")
    of_processes = {1: "/init.scope"}
    monkeypatch.setattr(Procfs, "cgroup", lambda self, pid: of_processes.get(pid))
    assert cgroup2_mount(tmp_path / "mounts") == (tmp_path if is_found else None)


@pytest.mark.parametrize(("of_first", "is_found"), [("/init.scope", True), ("/../..", False)])
def test_root_of_a_namespace_counts_where_the_node_s_first_process_is_in_it(
    tmp_path: pathlib.Path, of_first: str, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 2 0:3 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    monkeypatch.setattr(Procfs, "cgroup", lambda self, pid: of_first)
    assert cgroup2_mount(mounts) == (tmp_path if is_found else None)


def test_no_directory_is_read_for_no_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "walk")
    assert cgroup_paths(set()) == {}


def test_ids_are_those_of_the_directories_from_the_root_down(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    ids = [path.stat().st_ino for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")]
    assert ancestors(tmp_path, "/a/b") == existing(tmp_path, "/a//b/") == ids
    assert ancestors(tmp_path, "/") == existing(tmp_path, "/") == ids[:1]
    assert (ancestors(tmp_path, "/a/c"), existing(tmp_path, "/a/c")) == ([], ids[:2])
    assert (ancestors(tmp_path / "c", "/"), existing(tmp_path / "c", "/a")) == ([], [])


def test_cgroups_that_a_namespace_hides_are_zero(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "cgroup.type").touch()
    root, inner = tmp_path.stat().st_ino, (tmp_path / "a").stat().st_ino
    levels = {root: 2}
    monkeypatch.setattr("bpf.cgroup_levels.of_ancestor", levels.get)
    assert cgroups.root_level(tmp_path) == 2
    assert ancestors(tmp_path, "/a") == [0, 0, root, inner]
    assert existing(tmp_path, "/a/b") == [0, 0, root, inner]
    (tmp_path / "cgroup.type").unlink()
    assert cgroups.root_level(tmp_path) == 0
    assert ancestors(tmp_path, "/a") == [root, inner]


def test_mount_point_may_have_spaces(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "a b\\\t"
    mount.mkdir()
    mounts = tmp_path / "mounts"
    escaped = str(mount).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    mounts.write_text(f"1 2 0:3 / {escaped} rw - cgroup2 cgroup2 rw\n")
    monkeypatch.setattr(Procfs, "cgroup", lambda self, pid: "/")
    assert cgroup2_mount(mounts) == mount


def test_level_is_unknown_without_a_mount(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: pathlib.Path) -> bool:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(pathlib.Path, "exists", fail)
    assert cgroups.root_level(tmp_path) is None


def test_paths_of_cgroups_are_by_id(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / os.fsdecode(b"b\xff")).mkdir(parents=True)
    monkeypatch.setattr(cgroups, "cgroup2_mount", lambda: tmp_path)
    ids = {
        "/": tmp_path.stat().st_ino,
        "/a": (tmp_path / "a").stat().st_ino,
        "/a/b\\xff": (tmp_path / "a" / os.fsdecode(b"b\xff")).stat().st_ino,
    }
    expected = {number: path for path, number in ids.items()}
    assert cgroup_paths({*expected, 1}) == expected
    assert cgroup_paths({ids["/a"]}) == {ids["/a"]: "/a"}
    monkeypatch.setattr(cgroups, "cgroup2_mount", lambda: None)
    assert cgroup_paths(set(expected)) == {}
