"""Names without an agent: what it has saved."""

import pathlib

import msgspec
import pytest

from agent.admin.observations import ObservedPod
from agent.drops.source_processes import GONE, NAMES_FILE, NO_SOCKET, CgroupName
from agent.operate.pinned import names
from agent.operate.pinned.names import Names


def test_source_has_the_pod_that_the_agent_saved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "cgroup_paths", lambda ids: {7: "/system.slice/x.service"})
    scraper = ObservedPod(namespace="mix", name="scraper-5xq2z", host_network=True)
    saved = [CgroupName(5, "/kubepods/pod1/2", scraper)]
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / NAMES_FILE).write_bytes(msgspec.json.encode(saved))
    found = Names(tmp_path)
    assert found.source(5).pod_name == "mix/scraper-5xq2z"
    assert (found.source(7).path, found.source(7).pod_name) == ("/system.slice/x.service", "")
    assert found.source(0).path == NO_SOCKET


def test_paths_of_all_cgroups_are_found_in_one_walk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[set[int]] = []

    def walk(ids: set[int]) -> dict[int, str]:
        walks.append(ids)
        return {7: "/a"}

    monkeypatch.setattr(names, "cgroup_paths", walk)
    found = Names(tmp_path)
    found.learn([0, 7, 8])
    assert found.cgroup(7) == "/a"
    assert found.cgroup(8) == GONE
    assert walks == [{7, 8}]
