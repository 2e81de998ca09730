"""Long-lived tasks: named, watched, and none of them ends unnoticed."""

import asyncio
from collections.abc import Awaitable, Callable


class TaskEnded(Exception):
    """A task that should have run for ever returned."""


def start(
    group: asyncio.TaskGroup, name: str, run: Callable[[], Awaitable[None]]
) -> asyncio.Task[None]:
    """Run `run()` for as long as the group lives.

    When it raises or returns, the group ends and with it the agent: gates stay pinned, and the
    supervisor (the DaemonSet, systemd) starts a new agent. A half-dead agent would be worse.
    """
    return group.create_task(_watch(name, run), name=name)


async def _watch(name: str, run: Callable[[], Awaitable[None]]) -> None:
    await run()
    raise TaskEnded(f"task {name} ended, and it never should")
