"""One agent takes over from another, as in a DaemonSet's roll-out that never leaves a node alone.

There the new agent starts while the old one runs, and the old one gets its signal only when the new
one is available. So the new one prepares all it can, writes the started file, and waits for the
locks.
"""

import asyncio
import contextlib
import pathlib
import signal
from collections.abc import AsyncIterator, Iterator

import structlog

from agent.app.program_loading import Loading
from agent.linux.locks import AlreadyRunningError, exclusive
from agent.logs import Event
from agent.settings import Settings
from bpf import loader, pins

log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.1


@contextlib.asynccontextmanager
async def hold_node(
    settings: Settings, installation: pins.Pins, loading: Loading
) -> AsyncIterator[bool]:
    """Hold the locks of both directories; False when a signal ended the wait for them.

    Raises `AlreadyRunningError` when another agent still has them after `standby_seconds`, and what
    `loading` raises: an agent that cannot take over writes no started file.
    """
    with contextlib.ExitStack() as locks:
        is_ours = True
        try:
            locks.enter_context(_take_locks(settings, installation))
        except AlreadyRunningError:
            if not settings.standby_seconds:
                raise
            is_ours = await _wait_for_locks(locks, settings, installation, loading)
        yield is_ours


def remove_started_file(file: pathlib.Path | None) -> None:
    """Remove the file of a previous agent, since it outlives a container. Raises `OSError`, also
    where the file could not be created later."""
    if file is not None:
        file.touch()
        file.unlink()


def write_started_file(file: pathlib.Path | None) -> None:
    """Raises `OSError`."""
    if file is not None:
        file.touch()


async def _wait_for_locks(
    locks: contextlib.ExitStack, settings: Settings, installation: pins.Pins, loading: Loading
) -> bool:
    # The other agent's programs are not affected: pins are named by the hash of their sources.
    pinned = await asyncio.wrap_future(loading)
    (await loader.load(installation, pinned)).close()
    write_started_file(settings.started_file)
    log.info(
        Event.STANDBY_WAITING,
        seconds=settings.standby_seconds,
    )
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    deadline = loop.time() + settings.standby_seconds
    try:
        while not stop.is_set():
            try:
                locks.enter_context(_take_locks(settings, installation))
            except AlreadyRunningError:
                if loop.time() >= deadline:
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await stop.wait()
            else:
                log.info(Event.STANDBY_TAKING_OVER)
                return True
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    return False


@contextlib.contextmanager
def _take_locks(settings: Settings, installation: pins.Pins) -> Iterator[None]:
    with exclusive(settings.run_directory), exclusive(installation.root):
        yield
