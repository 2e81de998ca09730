"""What naming source processes costs, with the kernel's aggregate in memory."""

import asyncio
import pathlib
from typing import Any

import pytest

from agent.drops import source_processes
from agent.drops.source_processes import GONE, NO_SOCKET, SourceProcesses, saved_names
from agent.pods.conditions import Conditions
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf.drop_sources import DropSource
from bpf.verdicts import Mode

pytestmark = pytest.mark.looptime


class Aggregate:
    """The aggregate of drop sources; counts what is read of it."""

    def __init__(self) -> None:
        self.sources: list[DropSource] = []
        self.calls: list[str] = []

    def read(self) -> list[DropSource]:
        self.calls.append("read")
        return self.sources

    def cgroups(self) -> set[int]:
        self.calls.append("cgroups")
        return {source.cgroup for source in self.sources}


class Followed:
    """The aggregate, followed with cgroups that the test names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
        self.aggregate = Aggregate()
        self.paths: dict[int, str] = {}
        self.searches: list[set[int]] = []
        self.store = PodStore(Conditions())
        drop_sources: Any = self.aggregate
        self.processes = SourceProcesses(
            drop_sources,
            state=folder / "drop_sources.json",
            store=self.store,
            labels=ObjectLabels(),
        )
        monkeypatch.setattr(source_processes, "cgroup_paths", self._search)

    def _search(self, ids: set[int]) -> dict[int, str]:
        self.searches.append(ids)
        return {id: path for id, path in self.paths.items() if id in ids}

    def add(self, cgroup: int) -> None:
        self.aggregate.sources.append(DropSource(cgroup, 7, 6, 80, 1, 2, 3, "curl", Mode.AUDIT))

    async def run(self, seconds: float) -> None:
        task = asyncio.create_task(self.processes.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Followed:
    return Followed(monkeypatch, tmp_path)


async def test_the_aggregate_is_read_as_a_whole_only_for_a_report(followed: Followed) -> None:
    followed.add(5)
    await followed.run(60)
    assert set(followed.aggregate.calls) == {"cgroups"}
    followed.processes.read()
    assert followed.aggregate.calls[-1] == "read"


async def test_new_sources_of_a_report_have_their_names(followed: Followed) -> None:
    followed.add(5)
    followed.paths[5] = "/system.slice/scraper.service"
    followed.add(6)
    names = [(name.cgroup, name.path) for _, name in followed.processes.read()]
    assert names == [(5, "/system.slice/scraper.service"), (6, GONE)]


async def test_a_cgroup_that_is_gone_is_searched_once(followed: Followed) -> None:
    followed.add(5)
    await followed.run(60)
    assert followed.searches == [{5}]
    ((_, name),) = followed.processes.read()
    assert name.path == GONE


async def test_a_new_cgroup_is_named_at_the_next_look_and_keeps_its_name(
    followed: Followed,
) -> None:
    followed.paths[5] = "/system.slice/backup.service"
    followed.add(5)
    await followed.run(1)
    del followed.paths[5]
    ((_, name),) = followed.processes.read()
    assert name.path == "/system.slice/backup.service"


async def test_of_too_many_names_those_without_an_entry_are_forgotten(
    followed: Followed, tmp_path: pathlib.Path
) -> None:
    pods = {
        number: Pod(uid=f"0123abcd-0123-4567-89ab-{number:012}", namespace="shop", name=f"{number}")
        for number in (2, 3)
    }
    for number, pod in pods.items():
        followed.store.set_pod(pod)
        followed.paths[number] = f"/kubepods/pod{pod.uid}/x"
    followed.paths[1] = "/a"
    for number in range(1, 20_002):
        followed.add(number)
    await followed.run(60)
    del followed.aggregate.sources[2:]
    followed.add(30_000)
    await followed.run(60)
    saved = await asyncio.to_thread(saved_names, tmp_path / "drop_sources.json")
    assert [(name.cgroup, name.path, name.pod_name) for name in saved] == [
        (0, NO_SOCKET, ""),
        (1, "/a", ""),
        (2, followed.paths[2], "shop/2"),
        (30_000, GONE, ""),
    ]
    assert followed.processes.source(3).pod is None


async def test_new_source_is_named_after_a_hint_and_also_without_one(
    followed: Followed,
) -> None:
    task = asyncio.create_task(followed.processes.run())
    try:
        await asyncio.sleep(100)
        for hints, seconds in ((True, 10), (False, 90)):
            number = len(followed.paths) + 1
            followed.paths[number] = f"/{number}"
            followed.add(number)
            if hints:
                followed.processes.hint()
            await asyncio.sleep(seconds)
            assert followed.processes.cgroup_path(number) == f"/{number}"
        looks = len(followed.aggregate.calls)
        await asyncio.sleep(300)
        assert len(followed.aggregate.calls) - looks <= 11
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_busiest_source_is_the_first_and_cgroups_without_a_name_have_their_number(
    followed: Followed,
) -> None:
    for number, count in ((5, 1), (6, 9), (0, 4)):
        followed.aggregate.sources.append(
            DropSource(number, 7, 6, 80, 1, 2, count, "curl", Mode.AUDIT)
        )
    found = [(seen.count, name.path) for seen, name in followed.processes.read()]
    assert found == [(9, GONE), (4, NO_SOCKET), (1, GONE)]
    assert followed.processes.cgroup_path(99) == "(cgroup 99)"
