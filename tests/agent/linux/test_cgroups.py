"""Where cgroup v2 is found."""

import os
import pathlib

import pytest

from agent.linux.cgroups import cgroup2_mount, cgroup_paths
from agent.linux.procfs import Procfs


def test_only_the_root_of_cgroups_counts(tmp_path: pathlib.Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"1 2 0:3 /part {tmp_path} rw shared:1 - cgroup2 cgroup2 rw\n"
        "1 2 0:3 / /nowhere rw shared:1 - cgroup2 cgroup2 rw\n"
        "1 2 0:4 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    )
    assert cgroup2_mount(mounts) is None


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
