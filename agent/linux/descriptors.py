"""Descriptors: waiting for one, and some in reserve, for parts of a process that must work when
others have used all up."""

import asyncio
import errno
import os
from typing import Protocol


class HasDescriptor(Protocol):
    """What has a descriptor that polls readable."""

    def fileno(self) -> int: ...


async def readable(source: HasDescriptor) -> None:
    """Wait until it is readable."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    loop.add_reader(source, woken.set)
    try:
        await woken.wait()
    finally:
        loop.remove_reader(source)


class Reserve:
    """Holds descriptors until they are needed."""

    def __init__(self, count: int) -> None:
        """Raises `OSError`."""
        self._count = count
        self._held: list[int] = []
        if not self.refill():
            self.release()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def __len__(self) -> int:
        return len(self._held)

    def release(self) -> None:
        """Close all."""
        while self._held:
            os.close(self._held.pop())

    def refill(self) -> bool:
        """Take what is missing, as far as there are free ones. Whether none is missing."""
        try:
            while len(self._held) < self._count:
                self._held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return False
        return True
