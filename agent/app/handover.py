"""One agent takes over from another, as in a DaemonSet's roll-out that never leaves a node alone.

There the new agent is started while the old one runs, and the old one is told to end only when the
new one is available. So the new one prepares what can be prepared, says that it has started, and
waits for the locks.
"""

import asyncio
import contextlib
import pathlib
import signal
from collections.abc import AsyncIterator, Iterator

import structlog

from agent.linux.locks import AlreadyRunningError, exclusive
from agent.logs import Event
from agent.settings import Settings
from bpf import loader, pins

log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.1


@contextlib.asynccontextmanager
async def turn(settings: Settings, installation: pins.Pins) -> AsyncIterator[bool]:
    """Hold the locks of both directories; False when the process was told to end while it waited.

    Raises `AlreadyRunningError` when another agent still has them after `standby_seconds`, and what
    `loader.load` raises: who could not take over does not say that it has started.
    """
    with contextlib.ExitStack() as locks:
        is_ours = True
        try:
            locks.enter_context(_both(settings, installation))
        except AlreadyRunningError:
            if not settings.standby_seconds:
                raise
            is_ours = await _stand_by(locks, settings, installation)
        yield is_ours


def forget_start(file: pathlib.Path | None) -> None:
    """What an earlier agent said of itself: the file outlives a container. Raises `OSError`, also
    where the file could not be made later."""
    if file is not None:
        file.touch()
        file.unlink()


def tell_start(file: pathlib.Path | None) -> None:
    """Raises `OSError`."""
    if file is not None:
        file.touch()


async def _stand_by(
    locks: contextlib.ExitStack, settings: Settings, installation: pins.Pins
) -> bool:
    # Beside what the other agent uses: programs lie by the hash of their sources.
    (await loader.load(installation)).close()
    tell_start(settings.started_file)
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
                locks.enter_context(_both(settings, installation))
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
def _both(settings: Settings, installation: pins.Pins) -> Iterator[None]:
    with exclusive(settings.run_directory), exclusive(installation.root):
        yield
