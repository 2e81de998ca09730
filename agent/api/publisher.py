"""Revisions of a snapshot for many readers: coalesced, resumable, never waiting for a reader."""

import abc
import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

SnapshotT = TypeVar("SnapshotT")

# The largest integer that JSON carries exactly.
_MAX_INSTANCE_ID = (1 << 53) - 1
# A snapshot may be 100 kB or more: of a thousand readers no more than these are served at once, so
# that probes and gates run in between.
_READERS_AT_ONCE = 16
_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.2


class Readers:
    """Readers that wait for a change."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Wait until this is true; it is evaluated after each `wake`."""
        while not is_met():
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                await waiter
            finally:
                self._waiting.pop(waiter, None)

    @staticmethod
    async def wake(changed: Iterable["Readers"]) -> None:
        """Wake all that wait now, a few at once."""
        waiting = [waiter for readers in changed for waiter in readers._waiting]
        for number, waiter in enumerate(waiting, start=1):
            if not waiter.done():
                waiter.set_result(None)
            if number % _READERS_AT_ONCE == 0:
                await asyncio.sleep(_PAUSE_SECONDS)


class Publisher(abc.ABC):
    """Publishes what has changed, coalesced.

    `hint` costs nothing: changes within the settle window are published together. Nothing is
    published before `complete`.
    """

    def __init__(
        self, *, settle_seconds: float, instance_id: int | None = None, largest_share: float = 1.0
    ) -> None:
        """
        :param instance_id: of this run of the server; random by default.
        :param largest_share: of the time, what publishing may take; for that the next revision
            waits up to 0.2 s. 1: no limit.
        """
        self.instance_id = instance_id or 1 + secrets.randbelow(_MAX_INSTANCE_ID)
        self.rev = 0
        """The newest; 0 before the first."""
        self.is_ready = asyncio.Event()
        """Set with the first revision."""
        self._settle_seconds = settle_seconds
        self._pause_per_second = 1 / largest_share - 1
        self._complete = asyncio.Event()
        self._hinted = asyncio.Event()
        self._urgent = asyncio.Event()

    def hint(self, *, is_urgent: bool = False) -> None:
        """Something may have changed. is_urgent: end the settle window now."""
        self._hinted.set()
        if is_urgent:
            self._urgent.set()

    def complete(self) -> None:
        """All sources are read: publish from now on."""
        if not self._complete.is_set():
            self._complete.set()
            self.hint(is_urgent=True)

    async def run(self) -> None:
        """Publish revisions until cancelled."""
        await self._complete.wait()
        loop = asyncio.get_running_loop()
        pause_seconds = 0.0
        while True:
            await self._hinted.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(self._settle_seconds, pause_seconds)):
                    await self._urgent.wait()
            self._hinted.clear()
            self._urgent.clear()
            started = loop.time()
            await self._publish()
            took_seconds = loop.time() - started
            pause_seconds = min(took_seconds * self._pause_per_second, _LONGEST_PAUSE_SECONDS)

    @abc.abstractmethod
    async def _publish(self) -> None:
        """Re-read what was hinted; publish it if it has changed, and the first time."""


class SnapshotPublisher(Publisher, Generic[SnapshotT]):
    """Publishes the newest snapshot; a slow reader skips the revisions in between. A change
    without effect makes no revision."""

    def __init__(
        self, *, settle_seconds: float, instance_id: int | None = None, largest_share: float = 1.0
    ) -> None:
        """As `Publisher`."""
        super().__init__(
            settle_seconds=settle_seconds, instance_id=instance_id, largest_share=largest_share
        )
        self.snapshot: SnapshotT | None = None
        self._readers = Readers()

    @property
    def waiting(self) -> int:
        """Readers that wait for a newer snapshot."""
        return len(self._readers)

    def is_newer(self, instance_id: int, rev: int) -> bool:
        """Whether there is a snapshot, and it is not this one."""
        return self.snapshot is not None and (instance_id, rev) != (self.instance_id, self.rev)

    async def wait_newer(self, instance_id: int, rev: int) -> SnapshotT:
        """The newest snapshot, once it is not this one."""
        await self._readers.wait_until(lambda: self.is_newer(instance_id, rev))
        assert self.snapshot is not None
        return self.snapshot

    async def _publish(self) -> None:
        if await self._refresh() or self.snapshot is None:
            self.rev += 1
            self.snapshot = self._build()
            self.is_ready.set()
            await Readers.wake([self._readers])

    @abc.abstractmethod
    async def _refresh(self) -> bool:
        """Re-read what was hinted; whether the snapshot changes."""

    @abc.abstractmethod
    def _build(self) -> SnapshotT:
        """The snapshot of `self.rev`."""
