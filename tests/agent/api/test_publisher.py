"""How often a publisher publishes, in fake time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from agent.api.publisher import SnapshotPublisher

pytestmark = pytest.mark.looptime

_SETTLE_SECONDS, _TAKES_SECONDS = 0.005, 0.01


class Slow(SnapshotPublisher[int]):
    """Publishes its revision, which takes a while."""

    async def _refresh(self) -> bool:
        await asyncio.sleep(_TAKES_SECONDS)
        return True

    def _build(self) -> int:
        return self.rev


@contextlib.asynccontextmanager
async def changing(publisher: Slow) -> AsyncIterator[None]:
    """Something changes each millisecond."""

    async def change() -> None:
        while True:
            publisher.hint()
            await asyncio.sleep(0.001)

    publisher.complete()
    tasks = [asyncio.create_task(run()) for run in (publisher.run, change)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("share", "per_second"), [(1.0, 1 / 0.015), (0.1, 10), (0.01, 1 / 0.21)])
async def test_publishing_takes_no_more_than_its_share(share: float, per_second: float) -> None:
    publisher = Slow(settle_seconds=_SETTLE_SECONDS, largest_share=share)
    async with changing(publisher):
        await asyncio.sleep(20)
    assert publisher.rev == pytest.approx(20 * per_second, rel=0.1)


class Snapshots(SnapshotPublisher[int]):
    """Publishes numbers, and those that are new only."""

    def __init__(self, *, settle_seconds: float = 1.0) -> None:
        super().__init__(settle_seconds=settle_seconds, instance_id=7)
        self.is_new = True
        self.refreshes = 0

    async def _refresh(self) -> bool:
        self.refreshes += 1
        return self.is_new

    def _build(self) -> int:
        return 100 * self.rev


@contextlib.asynccontextmanager
async def published(publisher: Snapshots) -> AsyncIterator[None]:
    task = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_nothing_is_published_before_all_is_read() -> None:
    publisher = Snapshots()
    async with published(publisher):
        publisher.hint(is_urgent=True)
        await asyncio.sleep(10)
        assert (publisher.rev, publisher.snapshot, publisher.is_ready.is_set()) == (0, None, False)
        assert not publisher.is_newer(0, 0)
        publisher.complete()
        await asyncio.sleep(0.001)
        assert (publisher.rev, publisher.snapshot, publisher.is_ready.is_set()) == (1, 100, True)
        # The second time it is no change.
        publisher.complete()
        await asyncio.sleep(10)
        assert publisher.refreshes == 1


async def test_first_snapshot_is_published_whatever_it_has() -> None:
    publisher = Snapshots()
    publisher.is_new = False
    async with published(publisher):
        publisher.complete()
        await asyncio.sleep(0.001)
        assert publisher.snapshot == 100
        publisher.hint()
        await asyncio.sleep(2)
        assert (publisher.refreshes, publisher.rev) == (2, 1)


async def test_changes_of_one_moment_are_published_together_when_they_have_settled() -> None:
    publisher = Snapshots()
    async with published(publisher):
        publisher.complete()
        await asyncio.sleep(0.001)
        for _ in range(3):
            publisher.hint()
            await asyncio.sleep(0.3)
        assert publisher.rev == 1
        await asyncio.sleep(0.2)
        assert publisher.rev == 2
        await asyncio.sleep(10)
        assert publisher.rev == 2


async def test_reader_gets_the_newest_snapshot_once_it_is_not_the_one_that_it_has() -> None:
    publisher = Snapshots(settle_seconds=0.001)
    async with published(publisher):
        readers = [
            asyncio.create_task(publisher.wait_newer(*known))
            for known in ((7, 0), (7, 1), (7, 2), (6, 1))
        ]
        await asyncio.sleep(0)
        assert publisher.waiting == 4
        publisher.complete()
        await asyncio.sleep(0.1)
        assert [reader.done() for reader in readers] == [True, False, True, True]
        assert publisher.waiting == 1
        publisher.hint()
        assert await readers[1] == 200
        assert [reader.result() for reader in readers] == [100, 200, 100, 100]
        cancelled = asyncio.create_task(publisher.wait_newer(7, 2))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        assert publisher.waiting == 0


async def test_many_readers_are_woken_a_few_at_once() -> None:
    """Of each other work of the loop comes in between."""
    publisher = Snapshots(settle_seconds=0.0)
    loop = asyncio.get_running_loop()
    woken: list[float] = []

    async def read() -> None:
        await publisher.wait_newer(7, 0)
        woken.append(loop.time())

    async with published(publisher):
        readers = [asyncio.create_task(read()) for _ in range(40)]
        await asyncio.sleep(0)
        publisher.complete()
        await asyncio.gather(*readers)
    assert [woken.count(at) for at in sorted(set(woken))] == [16, 16, 8]


def test_instances_have_numbers_of_their_own() -> None:
    found = {Slow(settle_seconds=0.0).instance_id for _ in range(20)}
    assert len(found) == 20
    assert all(0 < number < 1 << 53 for number in found)
    assert Snapshots().instance_id == 7


async def test_urgent_change_does_not_wait() -> None:
    publisher = Slow(settle_seconds=_SETTLE_SECONDS, largest_share=0.01)
    async with changing(publisher):
        await asyncio.sleep(1)
        before = publisher.rev
        await publisher.wait_newer(publisher.instance_id, before)
        publisher.hint(is_urgent=True)
        await asyncio.sleep(_TAKES_SECONDS + 0.001)
        assert publisher.rev == before + 2
