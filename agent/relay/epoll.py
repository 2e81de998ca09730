"""Which descriptors are waited for, and whom it concerns: epoll(7), level-triggered.

Not asyncio: for each event its machinery costs more than all that the relay does with one.
"""

import select
from typing import Protocol

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
FAILED = select.EPOLLERR
HUNG_UP = select.EPOLLHUP


class Watcher(Protocol):
    """Somebody who is told what can be done with a descriptor."""

    def on_event(self, events: int) -> None:
        """events: bits of READABLE, WRITABLE, FAILED and HUNG_UP."""


class Poller:
    """One watcher for each descriptor. FAILED and HUNG_UP are told unasked."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watchers: dict[int, Watcher] = {}
        self._forgotten: set[int] = set()

    def close(self) -> None:
        self._epoll.close()

    def watch(self, fd: int, events: int, watcher: Watcher) -> None:
        self._epoll.register(fd, events)
        self._watchers[fd] = watcher

    def is_watching(self, fd: int) -> bool:
        return fd in self._watchers

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Wait for it no more."""
        self._epoll.unregister(fd)
        self.forget_closed(fd)

    def forget_closed(self, fd: int) -> None:
        """The same for one that is closed next: the kernel forgets it by itself, since no process
        and no other descriptor shares it.
        """
        del self._watchers[fd]
        self._forgotten.add(fd)

    def poll(self, seconds: float) -> None:
        """Wait for at most so long, and tell everybody concerned.

        What was closed in this round may be given out again in it, and an event of the one before
        is no news of the next: what there is to tell of that, the next round tells.
        """
        self._forgotten.clear()
        for fd, events in self._epoll.poll(seconds):
            if fd not in self._forgotten and (watcher := self._watchers.get(fd)):
                watcher.on_event(events)
