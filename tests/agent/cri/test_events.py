"""Hints of a runtime's events, and how often its stream is opened again."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.cri.client import CriError, CriUnimplementedError
from agent.cri.events import RuntimeEvents

pytestmark = pytest.mark.looptime


def now() -> float:
    return asyncio.get_running_loop().time()


class Runtime:
    """Its streams end after `seconds`, or as `error`; `opened`: when each was."""

    def __init__(self) -> None:
        self.seconds = 3600.0
        self.error: CriError | None = None
        self.is_connected = True
        self.opened: list[float] = []
        self.events_at: list[float] = []
        """After the start of a stream."""
        self.hints: list[float] = []

    async def events(self) -> AsyncGenerator[str, None]:
        self.opened.append(now())
        if self.error:
            raise self.error
        start = now()
        for at in self.events_at:
            await asyncio.sleep(start + at - now())
            yield "/tasks/start"
        await asyncio.sleep(start + self.seconds - now())

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[RuntimeEvents]:
        """Times are from its start on."""
        start = now()
        made = RuntimeEvents(
            lambda: self if self.is_connected else None,  # type: ignore[arg-type,return-value]
            lambda: self.hints.append(round(now() - start, 3)),
        )
        assert not made.is_open
        task = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.opened = [round(at - start, 3) for at in self.opened]


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


async def test_each_event_is_a_hint_and_so_is_what_may_have_been_missed(runtime: Runtime) -> None:
    runtime.events_at = [0.5, 3.0]
    runtime.seconds = 5.0
    async with runtime.followed() as events:
        await asyncio.sleep(0.9)
        is_open = [events.is_open]
        for _ in range(3):
            await asyncio.sleep(2)
            is_open.append(events.is_open)
        # The next one counts as open from 7 on.
        await asyncio.sleep(0.2)
        assert [*is_open, events.is_open] == [False, True, True, False, True]
    # The last one is the end of the agent.
    assert runtime.hints == [0.5, 1.0, 3.0, 5.0, 6.5, 7.0, 7.1]
    assert runtime.opened == [0.0, 6.0]


@pytest.mark.parametrize(
    ("error", "opened"),
    [
        (None, [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0]),
        (CriError("It does not respond."), [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0]),
        (CriUnimplementedError("It has none."), [0.0]),
    ],
)
async def test_stream_that_ends_at_once_is_opened_less_and_less_often(
    runtime: Runtime, error: CriError | None, opened: list[float]
) -> None:
    runtime.error, runtime.seconds = error, 0.0
    async with runtime.followed():
        await asyncio.sleep(200)
    assert runtime.opened == opened
    assert runtime.hints == []


async def test_runtime_without_events_is_tried_after_minutes(runtime: Runtime) -> None:
    runtime.error = CriUnimplementedError("It has none.")
    async with runtime.followed() as events:
        await asyncio.sleep(290)
        runtime.error = None
        await asyncio.sleep(20)
        assert events.is_open
    assert runtime.opened == [0.0, 300.0]


async def test_stream_that_was_open_for_a_while_is_opened_again_soon(runtime: Runtime) -> None:
    runtime.seconds = 0.0
    async with runtime.followed():
        await asyncio.sleep(20)
        runtime.seconds = 10.0
        await asyncio.sleep(25)
        runtime.seconds = 0.0
        await asyncio.sleep(12.5)
    assert runtime.opened == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 42.0, 53.0, 54.0, 56.0]


async def test_runtime_that_is_not_connected_is_tried_each_second(runtime: Runtime) -> None:
    runtime.is_connected = False
    async with runtime.followed():
        await asyncio.sleep(9.5)
        runtime.is_connected = True
        await asyncio.sleep(1)
    assert runtime.opened == [10.0]
