"""Waiting for what another process, thread or task does, where no event reports it."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agent.errors import PodgateError

T = TypeVar("T")

PATIENCE_VARIABLE = "PODGATE_TEST_PATIENCE"
"""A multiple of all limits, for machines that are slow: set by the tests (tests/polling.py)."""
_PATIENCE_SECONDS = 60
_POLL_SECONDS = 0.01


class TimedOutError(PodgateError):
    """A condition did not hold in time; the message has its name and the last value."""


def patience_seconds() -> float:
    """How long anything is awaited at most."""
    return _PATIENCE_SECONDS * float(os.environ.get(PATIENCE_VARIABLE, "1"))


async def until(what: str, check: Callable[[], T], *, seconds: float | None = None) -> T:
    """Call `check` until its result is true, and return that. Raises `TimedOutError`.

    what: the condition, for the message. seconds: `patience_seconds` if None. The event loop runs
    meanwhile.
    """
    limit = _Limit(what, seconds)
    while not (result := check()):
        limit.check(result)
        await asyncio.sleep(_POLL_SECONDS)
    return result


async def request_until(
    what: str,
    request: Callable[[], Awaitable[T]],
    holds: Callable[[T], object],
    *,
    seconds: float | None = None,
) -> T:
    """Repeat `request` until `holds` of its response, and return that. Raises `TimedOutError`."""
    limit = _Limit(what, seconds)
    while not holds(response := await request()):
        limit.check(response)
        await asyncio.sleep(_POLL_SECONDS)
    return response


def wait_until(what: str, check: Callable[[], T], *, seconds: float | None = None) -> T:
    """The same for callers without an event loop, and for threads."""
    limit = _Limit(what, seconds)
    while not (result := check()):
        limit.check(result)
        time.sleep(_POLL_SECONDS)
    return result


class _Limit:
    def __init__(self, what: str, seconds: float | None) -> None:
        self._what = what
        self._seconds = patience_seconds() if seconds is None else seconds
        self._deadline = time.monotonic() + self._seconds

    def check(self, result: object) -> None:
        if time.monotonic() > self._deadline:
            raise TimedOutError(
                f"{self._what}: not within {self._seconds:g} s; the last result was {result!r}"
            )
