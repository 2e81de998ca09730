"""One thread for calls that wait for RTNL, which the kernel would serialise anyway."""

import asyncio
import collections
import concurrent.futures
import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import structlog

from agent.logs import Event

T = TypeVar("T")

# A call is several system calls, after each of which this thread waits for Python's lock as long as
# this, where the event loop is busy: by default 5 ms, which adds up to 60 ms for a link.
_SWITCH_SECONDS = 0.0005

_Call = tuple["concurrent.futures.Future[Any]", Callable[[], Any]]

log = structlog.get_logger(__name__)


class Repairs(Protocol):
    """What the kernel's messages require before any call. All methods run in the thread."""

    def fileno(self) -> int:
        """Of the socket with the messages."""

    def read(self) -> None:
        """Take the messages that wait, if any."""

    def next(self) -> bool:
        """Make one repair, of some 15 ms. False: there is nothing to repair."""

    def close(self) -> None: ...


class GateThread:
    """Calls run one after the other: repairs before urgent ones, these before others, each kind in
    its order."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._urgent: collections.deque[_Call] = collections.deque()
        self._usual: collections.deque[_Call] = collections.deque()
        self._repairs: Repairs | None = None
        self._is_closed = False
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # poll(2) fails where it waits for more descriptors than the process may have now (EINVAL).
        self._readable = select.epoll()
        self._readable.register(self._wake, select.EPOLLIN)
        self._wake_lock = threading.Lock()
        threading.Thread(target=self._run, name="gates", daemon=True).start()

    async def run(self, call: Callable[[], T], *, is_urgent: bool = False) -> T:
        """Returns or raises as the call does. A call that is cancelled never runs, unless it runs
        already. Raises `RuntimeError` once the thread is closed."""
        if self._is_closed:
            raise RuntimeError("the thread is closed")
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        (self._urgent if is_urgent else self._usual).append((future, call))
        self._wake_up()
        return await asyncio.wrap_future(future)

    def repair(self, repairs: Repairs) -> None:
        """Make these repairs from now on, instead of previous ones. Call it in the thread, which
        closes them at its end."""
        self._end_repairs()
        self._readable.register(repairs.fileno(), select.EPOLLIN)
        self._repairs = repairs

    def breathe(self) -> None:
        """Make all repairs. For calls of several steps, between these."""
        while self._repair():
            pass

    def close(self) -> None:
        """Calls that wait run; does not wait for them."""
        self._is_closed = True
        self._wake_up()

    def _wake_up(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while self._step():
            pass
        self._end_repairs()
        with self._wake_lock:
            self._readable.close()
            os.close(self._wake)
            self._wake = -1

    def _step(self) -> bool:
        """One call, or a wait for one. False at the end."""
        is_closed = self._is_closed
        if self._repair():
            return True
        if calls := self._urgent or self._usual:
            _make(*calls.popleft())
            return True
        if is_closed:
            return False
        self._readable.poll()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return True

    def _repair(self) -> bool:
        """After an error, of any kind, no repairs are made here any more; checks from the event
        loop find what is lost, by calls of this thread."""
        if self._repairs is None:
            return False
        try:
            self._repairs.read()
            return self._repairs.next()
        except Exception as error:
            log.error(Event.CHAIN_ORDER_UNKNOWN, error=f"{type(error).__name__}: {error}")
            self._end_repairs()
            return False

    def _end_repairs(self) -> None:
        if self._repairs:
            # Closing it takes it out of what is waited for.
            self._repairs.close()
            self._repairs = None


def _make(future: "concurrent.futures.Future[Any]", call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
