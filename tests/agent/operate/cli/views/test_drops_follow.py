"""`podgate drops --follow --end-with-input`, which kubectl runs in the agent's container."""

import asyncio
import json
import os
import pathlib
import threading

import pytest

from agent.admin.report import DropEvents
from agent.errors import AgentUnreachableError
from agent.operate.cli.commands.options import Format
from agent.operate.cli.views import drops_follow


async def forever() -> None:
    await asyncio.Event().wait()


async def test_end_of_input_ends_it() -> None:
    reading, writing = os.pipe()
    following = asyncio.create_task(drops_follow.until_end_of_input(forever(), reading))
    try:
        os.write(writing, b"ignored")
        await asyncio.sleep(0.05)
        assert not following.done()
        os.close(writing)
        async with asyncio.timeout(30):
            await following
    finally:
        os.close(reading)


async def test_suppressed_events_are_reported(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number once, also where all events are of other pods."""
    lost = iter((5, 7, 7, 8))
    newest = 3

    async def fetch(_: pathlib.Path, after: int) -> DropEvents:
        if (count := next(lost, None)) is None:
            raise AgentUnreachableError("no agent responds")
        assert after == (0 if count == 5 else newest)
        return DropEvents(events=[], newest=newest, lost=count)

    monkeypatch.setattr(drops_follow, "_fetch", fetch)
    monkeypatch.setattr(drops_follow, "_PERIOD_SECONDS", 0.0)
    with pytest.raises(AgentUnreachableError):
        await drops_follow.follow(tmp_path, Format.JSON, lambda _: False)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["suppressed"] for line in lines] == [2, 1]
    assert all(line["at"] for line in lines)


async def test_error_ends_it_while_input_is_open() -> None:
    async def fail() -> None:
        raise AgentUnreachableError("no agent responds")

    reading, writing = os.pipe()
    try:
        with pytest.raises(AgentUnreachableError):
            await drops_follow.until_end_of_input(fail(), reading)
    finally:
        os.close(writing)
        # The thread that reads ends before its descriptor is another file's.
        for thread in threading.enumerate():
            if thread.name == "end of input":
                await asyncio.to_thread(thread.join, 30)
        os.close(reading)
