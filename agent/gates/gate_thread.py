"""One thread for calls that wait for RTNL, which the kernel would serialise anyway."""

import asyncio
import collections
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_Call = tuple["concurrent.futures.Future[Any]", Callable[[], Any]]


class GateThread:
    """Calls run one after the other: urgent ones first, each kind in its order."""

    def __init__(self) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gates")
        self._urgent: collections.deque[_Call] = collections.deque()
        self._usual: collections.deque[_Call] = collections.deque()

    async def run(self, call: Callable[[], T], *, is_urgent: bool = False) -> T:
        """Returns or raises as the call does. A call that is cancelled never runs, unless it runs
        already."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        (self._urgent if is_urgent else self._usual).append((future, call))
        # As often as there are calls, whichever is then the next.
        self._executor.submit(self._run_next)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Does not wait for calls."""
        self._executor.shutdown(wait=False)

    def _run_next(self) -> None:
        future, call = (self._urgent or self._usual).popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
