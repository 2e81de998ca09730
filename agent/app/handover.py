"""The node passes from one agent to the next, as in a DaemonSet's roll-out, and back.

There the new pod starts while the old one runs, and the old one is deleted once the new one is
ready. So the new agent prepares all it can and requests the node; the old one ends its work and
stands by. If the new one fails before the old one is deleted, the old one takes the node back.

Of two agents the one with the younger pod holds the node, so that restarts of containers do not
reverse a roll-out.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import signal
import time
from collections.abc import AsyncIterator, Iterator

import structlog

from agent.app import watchdog
from agent.app.program_loading import Loading
from agent.errors import AgentRequestError
from agent.linux.locks import AlreadyRunningError, exclusive, exclusive_if_present
from agent.logs import Event
from agent.settings import Settings
from bpf import loader, pins

log = structlog.get_logger(__name__)

_FILE = "since"
_POLL_SECONDS = 0.1
# The other agent polls, too, and a busy node may delay it. It may also have ended.
_LEAVE_SECONDS = 5.0
_REQUEST_SECONDS = 2.0
# After a rejection: the other agent may end, or be replaced by an older one.
_REPEAT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One time for which this process holds the node. is_take_over: the previous agent handed it
    over and stands by."""

    is_take_over: bool


class Handover:
    """This process and its turns. To be created on the running loop."""

    def __init__(self, settings: Settings, installation: pins.Pins, loading: Loading) -> None:
        """loading: of the programs. Raises `OSError` if the pod's directory cannot be written."""
        self._settings = settings
        self._installation = installation
        self._loading = loading
        self._since_ns = _first_start_ns(settings.pod_directory)
        self._has_handed_over = False
        self.requested = asyncio.Event()
        """Set when another agent may have the node: the turn is to end."""
        self.turns = 0
        """How often this process has held the node."""
        self.stopping = asyncio.Event()
        """Set by SIGTERM and SIGINT, once `handle_signals` was called."""

    def handle_signals(self) -> None:
        """From now on signals set `stopping`; before, they end the process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)

    def request(self, since_ns: int) -> str | None:
        """Another agent requests the node. since_ns: when its pod's first agent started, in the
        kernel's monotonic time. Returns why it does not get it, in one sentence."""
        if since_ns <= self._since_ns:
            return "the agent that holds the node has a younger pod."
        self.requested.set()
        return None

    async def wait_for_end(self, *others: asyncio.Event) -> None:
        """Wait until the turn is to end: another agent may have the node, this process is to stop,
        or one of these events is set."""
        events = (self.requested, self.stopping, *others)
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn | None]:
        """Hold the locks of both directories; None when a signal ended the wait for them.

        Raises `AlreadyRunningError` when another agent still has them after `standby_seconds`, and
        what `loading` raises: an agent that cannot load its programs requests nothing.
        """
        with contextlib.ExitStack() as locks:
            if self._has_handed_over:
                await self._leave()
            turn = None if self.stopping.is_set() else await self._acquire(locks)
            self.requested.clear()
            self.turns += turn is not None
            yield turn
            self._has_handed_over = self.requested.is_set()

    async def _leave(self) -> None:
        """Until the agent that requested the node holds it, or has had the time to."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LEAVE_SECONDS
        with contextlib.suppress(AlreadyRunningError):
            while loop.time() < deadline and not self.stopping.is_set():
                with self._take_locks():
                    pass
                await self._pause()

    async def _acquire(self, locks: contextlib.ExitStack) -> Turn | None:
        try:
            locks.enter_context(self._take_locks())
        except AlreadyRunningError:
            if not self._settings.standby_seconds and not self._has_handed_over:
                raise
            return await self._wait(locks)
        return Turn(is_take_over=False)

    async def _wait(self, locks: contextlib.ExitStack) -> Turn | None:
        if not self._has_handed_over:
            # The other agent's programs are not affected: pins are named by their sources' hash.
            pinned = await asyncio.wrap_future(self._loading)
            (await loader.load(self._installation, pinned)).close()
        log.info(Event.STANDBY_WAITING, seconds=self._limit_seconds)
        self.handle_signals()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limit_seconds if self._limit_seconds else None
        is_granted = False
        request_at = loop.time()
        while not self.stopping.is_set():
            try:
                locks.enter_context(self._take_locks())
            except AlreadyRunningError:
                if deadline is not None and loop.time() >= deadline:
                    raise
            else:
                log.info(Event.STANDBY_TAKING_OVER)
                return Turn(is_take_over=is_granted)
            if not self._has_handed_over and loop.time() >= request_at:
                is_granted = await self._request() or is_granted
                request_at = loop.time() + _REPEAT_SECONDS
            await self._pause()
        return None

    async def _pause(self) -> None:
        """Until the next check of the locks, or the end."""
        watchdog.beat(self._settings.watchdog_seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_SECONDS):
                await self.stopping.wait()

    @property
    def _limit_seconds(self) -> float:
        """Of a wait, 0 for none: one that handed the node over waits until its pod is deleted."""
        return 0.0 if self._has_handed_over else self._settings.standby_seconds

    async def _request(self) -> bool:
        """Whether the agent that holds the node hands it over."""
        from agent.admin import client as admin_client  # 0.1 s that other starts do not need

        resource = f"/handover?since={self._since_ns}"
        socket = self._settings.admin_socket
        try:
            await admin_client.post(socket, resource, timeout_seconds=_REQUEST_SECONDS)
        except AgentRequestError as error:
            log.info(Event.HANDOVER_REJECTED, reason=str(error))
            return False
        return True

    @contextlib.contextmanager
    def _take_locks(self) -> Iterator[None]:
        # There is no run directory while its file system is full.
        run_directory = exclusive_if_present(self._settings.run_directory)
        with run_directory, exclusive(self._installation.root):
            yield


def _first_start_ns(directory: pathlib.Path | None) -> int:
    """When the first agent of this pod started; now without a directory that outlives it."""
    now = time.monotonic_ns()
    if directory is None:
        return now
    file = directory / _FILE
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(file.read_text(encoding="ascii"))
    file.write_text(str(now), encoding="ascii")
    return now
