"""Long-lived tasks: named and supervised, so that none of them stops unnoticed."""

import asyncio
import errno
from collections.abc import Awaitable, Callable

import structlog

from agent.logs import Event

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0


class TaskEndedError(Exception):
    """A task that runs until the agent stops has returned."""


def start(
    group: asyncio.TaskGroup, name: str, run: Callable[[], Awaitable[None]]
) -> asyncio.Task[None]:
    """Run `run()` until the group is cancelled, again where it found no free file descriptor.

    When it raises anything else or returns, the group fails and the agent stops: gates stay pinned,
    and the supervisor (the DaemonSet, systemd) starts a new agent. An agent without one of its
    tasks would be worse. But a new agent would find no more descriptors than this one: only the
    machine may have none left, or what this process has open closes soon.
    """
    return group.create_task(_watch(name, run), name=name)


async def _watch(name: str, run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except (OSError, ExceptionGroup) as error:
            if not is_shortage(error):
                raise
            log.error(Event.DESCRIPTORS_EXHAUSTED, task=name, error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            raise TaskEndedError(f"task {name} stopped unexpectedly")


def is_shortage(error: BaseException) -> bool:
    """Whether there was no free descriptor, of this process or of the machine, and no other
    problem."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_shortage, error.exceptions))
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
