"""Descriptors in reserve, for parts of a process that must work when others have used all up."""

import errno
import os


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
