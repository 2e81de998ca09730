"""Long-lived tasks: named and supervised, so that none of them stops unnoticed."""

import asyncio
from collections.abc import Awaitable, Callable


class TaskEndedError(Exception):
    """A task that runs until the agent stops has returned."""


def start(
    group: asyncio.TaskGroup, name: str, run: Callable[[], Awaitable[None]]
) -> asyncio.Task[None]:
    """Run `run()` until the group is cancelled.

    When it raises or returns, the group fails and the agent stops: gates stay pinned, and the
    supervisor (the DaemonSet, systemd) starts a new agent. An agent without one of its tasks would
    be worse.
    """
    return group.create_task(_watch(name, run), name=name)


async def _watch(name: str, run: Callable[[], Awaitable[None]]) -> None:
    await run()
    raise TaskEndedError(f"task {name} stopped unexpectedly")
