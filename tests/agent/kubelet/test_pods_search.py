"""When the cgroup of pods is searched, in fake time."""

import asyncio
import contextlib
import pathlib
from collections.abc import Collection

import pytest

from agent.kubelet.pods_search import PodsSearch
from agent.linux.pods_cgroup import PodsCgroup

pytestmark = pytest.mark.looptime


class Recorded(PodsCgroup):
    """It is found by the last of some searches."""

    def __init__(self, needed: int) -> None:
        super().__init__(None)
        self._needed = needed
        self.searches = 0

    @property
    def confirmed(self) -> pathlib.Path | None:
        return pathlib.Path("/x/kubepods") if self.searches >= self._needed else None

    def search(self, uids: Collection[str]) -> bool:
        self.searches += 1
        return self.searches == self._needed


async def run(made: Recorded, uids: set[str], seconds: float) -> list[float]:
    """When it was found."""
    loop, found = asyncio.get_running_loop(), list[float]()
    search = PodsSearch(made, lambda: uids, on_found=lambda: found.append(loop.time()))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await search.run()
    return found


async def test_search_ends_when_it_is_found() -> None:
    made = Recorded(3)
    assert [round(at) for at in await run(made, {"uid"}, 600)] == [4]
    assert made.searches == 3


async def test_nothing_is_searched_without_pods() -> None:
    made = Recorded(1)
    assert await run(made, set(), 600) == []
    assert made.searches == 0


async def test_search_without_success_becomes_rare() -> None:
    made = Recorded(1000)
    assert await run(made, {"uid"}, 3600) == []
    assert made.searches == 16 + 11
