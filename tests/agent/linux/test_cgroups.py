"""Where cgroup v2 is found."""

import os
import pathlib

import pytest

from agent.linux.cgroups import cgroup2_mount, cgroup_paths


def test_only_the_root_of_cgroups_counts(tmp_path: pathlib.Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"cgroup2 {tmp_path} cgroup2 rw 0 0\ncgroup2 /nowhere cgroup2 rw 0 0\n"
        "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n"
    )
    assert cgroup2_mount(mounts) is None


def test_no_directory_is_read_for_no_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "walk")
    assert cgroup_paths(set()) == {}
