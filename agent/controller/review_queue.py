"""A queue of reviews: answered one at a time in a thread, the smallest first.

A review of a large pod takes seconds of CPU, and the event loop renews the Lease meanwhile. Pods of
users are small, so the ones that a client sends to keep the controller busy wait for them.
"""

import asyncio
import dataclasses
import heapq
import itertools
from collections.abc import Callable

from agent.errors import PodgateError

_MAX_BYTES = 32 << 20

Answer = Callable[[bytes], bytes]
"""The response's body for a review's. It runs in a thread."""


class ReviewsOverloadedError(PodgateError):
    """The review is larger than the others that wait, and there is no room for all."""


@dataclasses.dataclass(order=True, slots=True)
class _Waiting:
    size: int
    number: int
    body: bytes = dataclasses.field(compare=False)
    answer: Answer = dataclasses.field(compare=False)
    result: "asyncio.Future[bytes]" = dataclasses.field(compare=False)


class ReviewQueue:
    """The queue of one server."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        """max_bytes: of all reviews that wait."""
        self._max_bytes = max_bytes
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._is_filled = asyncio.Event()

    async def answer(self, body: bytes, answer: Answer) -> bytes:
        """The result of `answer`. Raises `ReviewsOverloadedError`, and what `answer` raises."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        heapq.heappush(
            self._waiting, _Waiting(len(body), next(self._numbers), body, answer, future)
        )
        self._limit()
        self._is_filled.set()
        return await future

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self._is_filled.wait()
            if not self._waiting:
                self._is_filled.clear()
                continue
            review = heapq.heappop(self._waiting)
            if review.result.done():
                continue  # its client is gone
            try:
                result = await asyncio.to_thread(review.answer, review.body)
            except Exception as error:
                if not review.result.done():
                    review.result.set_exception(error)
            else:
                if not review.result.done():
                    review.result.set_result(result)

    def _limit(self) -> None:
        """Reject the largest while all together are too large."""
        self._waiting = [one for one in self._waiting if not one.result.done()]
        heapq.heapify(self._waiting)
        while sum(one.size for one in self._waiting) > self._max_bytes:
            largest = max(self._waiting)
            self._waiting.remove(largest)
            heapq.heapify(self._waiting)
            largest.result.set_exception(
                ReviewsOverloadedError("too many large reviews wait; the pod starts without one")
            )
