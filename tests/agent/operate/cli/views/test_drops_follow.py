"""`podgate drops --follow --end-with-input`, which kubectl runs in the agent's container."""

import asyncio
import os
import threading

import pytest

from agent.errors import AgentUnreachableError
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
