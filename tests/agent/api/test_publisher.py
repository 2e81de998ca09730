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


async def test_urgent_change_does_not_wait() -> None:
    publisher = Slow(settle_seconds=_SETTLE_SECONDS, largest_share=0.01)
    async with changing(publisher):
        await asyncio.sleep(1)
        before = publisher.rev
        await publisher.wait_newer(publisher.instance_id, before)
        publisher.hint(is_urgent=True)
        await asyncio.sleep(_TAKES_SECONDS + 0.001)
        assert publisher.rev == before + 2
