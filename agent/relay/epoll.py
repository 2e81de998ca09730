"""The relay's event loop: epoll(7), level-triggered, with one handler per descriptor.

Not asyncio: its overhead per event exceeds the relay's own work for that event.
"""

import select
from typing import Protocol

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
FAILED = select.EPOLLERR
HUNG_UP = select.EPOLLHUP


class FdHandler(Protocol):
    """Handles the events of one descriptor."""

    def on_event(self, events: int) -> None:
        """events: bits of READABLE, WRITABLE, FAILED and HUNG_UP."""


class EpollPoller:
    """One handler per descriptor. FAILED and HUNG_UP are always reported."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, FdHandler] = {}
        self._unregistered: set[int] = set()

    def close(self) -> None:
        self._epoll.close()

    def register(self, fd: int, events: int, handler: FdHandler) -> None:
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def is_registered(self, fd: int) -> bool:
        return fd in self._handlers

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        self._epoll.unregister(fd)
        self.unregister_closed(fd)

    def unregister_closed(self, fd: int) -> None:
        """The same for a descriptor that is closed next. Closing it removes it from the epoll set,
        since no process and no other descriptor shares it.
        """
        del self._handlers[fd]
        self._unregistered.add(fd)

    def poll(self, seconds: float) -> None:
        """Wait for events for at most this time, and call their handlers.

        A descriptor closed in this round may be reused in it by another file, to which the events
        of this round do not belong: they are skipped, and the next round reports the new file's.
        """
        self._unregistered.clear()
        for fd, events in self._epoll.poll(seconds):
            if fd not in self._unregistered and (handler := self._handlers.get(fd)):
                handler.on_event(events)
