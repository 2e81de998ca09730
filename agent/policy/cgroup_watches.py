"""Wakes up what depends on sources' cgroups when one of these may have appeared or disappeared."""

import asyncio
import contextlib
from collections.abc import Iterator

import structlog

from agent import tasks
from agent.linux.inotify import DirectoryWatches
from agent.logs import Event
from agent.policy.source_cgroups import SourceCgroups

log = structlog.get_logger(__name__)

# Without inotify: a restarted service has a new cgroup, and its first SYN is sent again after 1 s.
_PERIOD_WITHOUT_WATCHES_SECONDS = 0.25


class CgroupWatches:
    """Watches the directories that the last `SourceCgroups.resolve` has read."""

    def __init__(self, cgroups: SourceCgroups, wake: asyncio.Event) -> None:
        """wake: set for each change."""
        self._cgroups = cgroups
        self._wake = wake

    @property
    def are_complete(self) -> bool:
        """Whether all that matters is watched; otherwise `run` wakes up often enough."""
        watches = self._cgroups.watches
        return watches is not None and not watches.problem

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        try:
            watches = DirectoryWatches()
        except OSError as error:
            log.warning(Event.CGROUPS_NOT_WATCHED, error=str(error))
            yield
            return
        self._cgroups.watches = watches
        loop = asyncio.get_running_loop()
        loop.add_reader(watches, self._on_change, watches)
        try:
            yield
        finally:
            self._cgroups.watches = None
            loop.remove_reader(watches)
            watches.close()

    async def run(self) -> None:
        """Wake up often enough while cgroups are not watched, or not all of them."""
        is_logged = self._cgroups.watches is None
        while True:
            await tasks.tick(_PERIOD_WITHOUT_WATCHES_SECONDS)
            if self.are_complete:
                continue
            self._wake.set()
            watches = self._cgroups.watches
            if watches and not is_logged:
                log.warning(Event.CGROUPS_NOT_WATCHED, error=watches.problem)
                is_logged = True

    def _on_change(self, watches: DirectoryWatches) -> None:
        watches.drain()
        self._wake.set()
