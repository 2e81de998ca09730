"""Reviews wait for each other, the smallest first, and together hold little memory."""

import asyncio
import threading

import pytest

from agent.controller.review_queue import ReviewQueue, ReviewsOverloadedError


class Held:
    """A queue whose first review is being answered until `release`."""

    def __init__(self, queue: ReviewQueue) -> None:
        self.queue = queue
        self.answered: list[int] = []
        """Sizes, in the order of the answers."""
        self._is_released = threading.Event()

    async def start(self) -> "asyncio.Task[bytes]":
        is_begun = threading.Event()

        def hold(body: bytes) -> bytes:
            is_begun.set()
            assert self._is_released.wait(60)
            return body

        first = asyncio.create_task(self.queue.answer(b"", hold))
        assert await asyncio.to_thread(is_begun.wait, 60)
        return first

    async def add(self, size: int) -> "asyncio.Task[bytes]":
        """One that waits."""
        made = asyncio.create_task(self.queue.answer(bytes(size), self._answer))
        await asyncio.sleep(0)
        return made

    def release(self) -> None:
        self._is_released.set()

    def _answer(self, body: bytes) -> bytes:
        self.answered.append(len(body))
        return b"answered"


@pytest.fixture
async def held() -> Held:
    return Held(ReviewQueue(max_bytes=100))


async def _run(queue: ReviewQueue) -> "asyncio.Task[None]":
    return asyncio.create_task(queue.run())


async def test_small_reviews_do_not_wait_for_large_ones(held: Held) -> None:
    running = await _run(held.queue)
    first = await held.start()
    waiting = [await held.add(size) for size in (50, 3, 20, 3)]
    held.release()
    assert await asyncio.gather(first, *waiting) == [b"", *[b"answered"] * 4]
    assert held.answered == [3, 3, 20, 50]
    running.cancel()


async def test_largest_review_is_rejected_when_all_together_are_too_large(held: Held) -> None:
    running = await _run(held.queue)
    first = await held.start()
    large = await held.add(60)
    small = [await held.add(20) for _ in range(2)]
    with pytest.raises(ReviewsOverloadedError):
        await (await held.add(70))
    small.append(await held.add(10))
    with pytest.raises(ReviewsOverloadedError):
        await large
    held.release()
    await asyncio.gather(first, *small)
    assert held.answered == [10, 20, 20]
    running.cancel()


async def test_small_reviews_come_first_also_after_one_was_rejected(held: Held) -> None:
    running = await _run(held.queue)
    first = await held.start()
    waiting = [await held.add(size) for size in (3, 22, 7, 12, 23, 1, 19, 17)]
    held.release()
    found = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert [isinstance(one, ReviewsOverloadedError) for one in found].index(True) == 5
    assert held.answered == [1, 3, 7, 12, 17, 19, 22]
    running.cancel()


async def test_review_whose_client_is_gone_is_not_answered(held: Held) -> None:
    running = await _run(held.queue)
    first = await held.start()
    gone, other = await held.add(5), await held.add(6)
    gone.cancel()
    await asyncio.sleep(0)
    held.release()
    await asyncio.gather(first, other)
    assert held.answered == [6]
    running.cancel()


async def test_error_of_one_review_is_its_own(held: Held) -> None:
    def fail(body: bytes) -> bytes:
        raise ValueError(f"{len(body)} bytes")

    running = await _run(held.queue)
    with pytest.raises(ValueError, match="2 bytes"):
        await held.queue.answer(b"ab", fail)
    assert await held.queue.answer(b"ab", bytes) == b"ab"
    running.cancel()
