"""Calls that may block for a moment, made by one thread for all that are due at one tick.

A thread that gets a call and returns its result wakes the process four times, which is more than
most such calls take: some reads of /proc and of small directories. One that hangs, as on a hung
file system, holds up no other: soon each of those left gets a thread of its own.
"""

import asyncio
import collections
import contextvars
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE_SECONDS = 0.05


class _Call:
    """One call, in the context of the task that made it, and its outcome."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.future = asyncio.get_running_loop().create_future()
        self.error: BaseException | None = None
        self._context = contextvars.copy_context()
        self._function = function
        self._result: object = None

    def make(self) -> None:
        try:
            self._result = self._context.run(self._function)
        except BaseException as error:
            self.error = error

    def deliver(self) -> None:
        if self.future.done():
            return  # its task was cancelled
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self._result)


class _Batch:
    """The calls of one turn of the event loop. All but `_make` is for the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: collections.deque[_Call] = collections.deque()
        self._made: collections.deque[_Call] = collections.deque()
        self._patience: asyncio.TimerHandle | None = None

    def add(self, call: _Call) -> None:
        self._waiting.append(call)

    def start(self) -> None:
        self._patience = self._loop.call_later(_PATIENCE_SECONDS, self._split)
        self._make_in_thread()

    def _make_in_thread(self) -> None:
        try:
            making = self._loop.run_in_executor(None, self._make)
        except RuntimeError as error:  # the loop has shut its threads down
            while self._waiting:
                call = self._waiting.popleft()
                call.error = error
                call.deliver()
        else:
            making.add_done_callback(lambda _: self._deliver())

    def _make(self) -> None:
        while self._waiting:
            try:
                call = self._waiting.popleft()
            except IndexError:
                return  # another thread has it
            call.make()
            self._made.append(call)

    def _deliver(self) -> None:
        while self._made:
            self._made.popleft().deliver()
        if not self._waiting and self._patience is not None:
            self._patience.cancel()

    def _split(self) -> None:
        for _ in range(len(self._waiting)):
            self._make_in_thread()
        self._deliver()


_open: dict[asyncio.AbstractEventLoop, _Batch] = {}
"""By event loop: the batch of its current turn."""


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, for what is done at each tick: with the calls of other tasks, after
    these have had their turn.

    Before, the thread would wait for Python's lock, which wakes it twice a millisecond.
    """
    loop = asyncio.get_running_loop()
    batch = _open.get(loop)
    if batch is None:
        batch = _open[loop] = _Batch(loop)
        loop.call_soon(_start, loop)
    call = _Call(functools.partial(function, *args, **kwargs))
    batch.add(call)
    result: T = await call.future
    return result


def _start(loop: asyncio.AbstractEventLoop) -> None:
    _open.pop(loop).start()
