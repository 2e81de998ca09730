"""What a bug report shows of an agent that waits."""

import asyncio
import threading

from agent.app import stacks


async def wait(event: asyncio.Event) -> None:
    async with asyncio.timeout(60):
        await event.wait()


async def test_each_task_is_shown_with_what_it_waits_for() -> None:
    event = asyncio.Event()
    task = asyncio.create_task(wait(event), name="relay")
    await asyncio.sleep(0)
    (line,) = [line for line in stacks.text().splitlines() if line.startswith("task relay: ")]
    places = [place.partition(":")[0] for place in line.removeprefix("task relay: ").split(" > ")]
    assert places == ["app/test_stacks.py", "asyncio/locks.py"]
    assert line.endswith(" wait")
    event.set()
    await task
    assert "task relay:" not in stacks.text()


async def test_each_thread_is_shown_with_its_calls() -> None:
    event = threading.Event()

    def block() -> None:
        event.wait()

    thread = threading.Thread(target=block, name="gates")
    thread.start()
    found = {line.partition(":")[0]: line for line in stacks.text().splitlines()}
    assert " block > " in found["thread gates"]
    assert found["thread MainThread"].endswith(" text")
    event.set()
    thread.join()
