"""Waiting for what another process, thread or task does, for tests that get no event of it."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

# A multiple for machines emulated in software (make test-kernels), where all takes twenty times as
# long as elsewhere; what is already tight there takes its square.
PATIENCE: Final = float(os.environ.get("PODGATE_TEST_PATIENCE", "1"))
PATIENCE_SECONDS: Final = 60 * PATIENCE
_POLL_SECONDS: Final = 0.01


class TimedOutError(AssertionError):
    """A condition did not hold in time; the message has its name and the last value."""


async def until(what: str, check: Callable[[], T], *, seconds: float = PATIENCE_SECONDS) -> T:
    """Call `check` until its result is true, and return that. Raises `TimedOutError`.

    what: the condition, for the message. The event loop runs meanwhile.
    """
    deadline = time.monotonic() + seconds
    while not (result := check()):
        _give_up_after(deadline, what, seconds, result)
        await asyncio.sleep(_POLL_SECONDS)
    return result


async def request_until(
    what: str,
    request: Callable[[], Awaitable[T]],
    holds: Callable[[T], object],
    *,
    seconds: float = PATIENCE_SECONDS,
) -> T:
    """Repeat `request` until `holds` of its response, and return that. Raises `TimedOutError`."""
    deadline = time.monotonic() + seconds
    while not holds(response := await request()):
        _give_up_after(deadline, what, seconds, response)
        await asyncio.sleep(_POLL_SECONDS)
    return response


def wait_until(what: str, check: Callable[[], T], *, seconds: float = PATIENCE_SECONDS) -> T:
    """The same for tests without an event loop, and for threads."""
    deadline = time.monotonic() + seconds
    while not (result := check()):
        _give_up_after(deadline, what, seconds, result)
        time.sleep(_POLL_SECONDS)
    return result


def _give_up_after(deadline: float, what: str, seconds: float, result: object) -> None:
    if time.monotonic() > deadline:
        raise TimedOutError(f"{what}: not within {seconds:g} s; the last result was {result!r}")
