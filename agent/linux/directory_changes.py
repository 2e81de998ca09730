"""Changes of files in directories.

Events of the file system are hints only: the whole directory is to be read again after each, so
renames, atomic symlink swaps (ConfigMaps) and lost events are all the same. Where the node has no
inotify instance or watch left (containerd's shims take two of root's 128 for each pod), or the
directory is missing, there are hints every few seconds.
"""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable, Collection
from typing import TypeVar

import structlog

from agent import batches, tasks
from agent.linux.inotify import DirectoryWatches
from agent.logs import Event

T = TypeVar("T")

log = structlog.get_logger(__name__)

# Editors write in several steps; an immediate read would report a half-written file as invalid.
_SETTLE_SECONDS = 0.05
# Reading the stamps of a directory takes some system calls.
_POLL_SECONDS = 2.0
# Others may have released theirs.
_RETRY_SECONDS = 60.0


async def follow(
    *directories: pathlib.Path,
    at_least_every_seconds: float | None = None,
    poll_seconds: float = _POLL_SECONDS,
) -> AsyncIterator[None]:
    """One item whenever something may have changed in the directories, until cancelled.

    at_least_every_seconds: one item after so long without any change, too; poll_seconds: the same
    while one of them cannot be watched.
    """
    async for _ in read(
        *directories,
        read=lambda: None,
        at_least_every_seconds=at_least_every_seconds,
        poll_seconds=poll_seconds,
    ):
        yield


async def read(
    *directories: pathlib.Path,
    read: Callable[[], T],
    at_least_every_seconds: float | None = None,
    poll_seconds: float = _POLL_SECONDS,
) -> AsyncIterator[T]:
    """As `follow`, with what `read` returns, which a thread calls before each item."""
    if at_least_every_seconds is not None:
        poll_seconds = min(poll_seconds, at_least_every_seconds)
    loop = asyncio.get_running_loop()
    is_logged = False
    while True:
        try:
            watches = DirectoryWatches(reports_writes=True)
        except OSError as error:
            if not is_logged:
                _log(directories, str(error.strerror))
            is_logged = True
            retry_at = loop.time() + _RETRY_SECONDS
            while loop.time() < retry_at:
                await asyncio.sleep(poll_seconds)
                yield await batches.in_thread(read)
            continue
        is_logged = False
        with contextlib.closing(watches):
            readable = asyncio.Event()
            loop.add_reader(watches, readable.set)
            try:
                async for found in _read(
                    watches, readable, directories, read, at_least_every_seconds, poll_seconds
                ):
                    yield found
            finally:
                loop.remove_reader(watches)


async def _read(
    watches: DirectoryWatches,
    readable: asyncio.Event,
    directories: Collection[pathlib.Path],
    read: Callable[[], T],
    limit_seconds: float | None,
    poll_seconds: float,
) -> AsyncIterator[T]:
    def watch_and_read() -> T:
        # Another directory of this name is another one. What happens from here on is an event.
        watches.watch_only(directories)
        return read()

    problem = ""
    while True:
        found = await batches.in_thread(watch_and_read)
        if watches.problem and not problem:
            _log(directories, watches.problem)
        problem = watches.problem
        yield found
        is_watched = all(map(watches.has, directories))
        seconds = limit_seconds if is_watched else poll_seconds
        due_at = None if seconds is None else tasks.next_tick(seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due_at):
                await readable.wait()
                await asyncio.sleep(_SETTLE_SECONDS)
        watches.drain()
        readable.clear()


def _log(directories: Collection[pathlib.Path], problem: str) -> None:
    names = ", ".join(map(str, directories))
    log.warning(Event.DIRECTORY_NOT_WATCHED, directory=names, error=problem)
