"""inotify(7): notifications when entries of directories are created, removed, renamed, written, and
when a file is written."""

import ctypes
import errno
import os
import pathlib
import threading
from collections.abc import Collection

# include/uapi/linux/inotify.h
_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x40, 0x80, 0x100, 0x200
_IN_ONLYDIR = 0x01000000
_IN_MODIFY, _IN_CLOSE_WRITE = 0x2, 0x8
_MASK = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_ONLYDIR
# Errors of inotify_add_watch(2) for a directory that does not exist.
_MISSING = (errno.ENOENT, errno.ENOTDIR)

_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatches:
    """Watches a set of directories, cgroups included: these are made by mkdir(2), too.

    Its descriptor becomes readable; which entry changed is not reported. Threads may use it at
    once.
    """

    def __init__(self, *, reports_writes: bool = False) -> None:
        """reports_writes: also when a file was written and closed. Raises `OSError`, for instance
        if the user has no instance left."""
        self._mask = _MASK | _IN_CLOSE_WRITE if reports_writes else _MASK
        self._lock = threading.Lock()
        self._descriptor = _open()
        self._watched: dict[pathlib.Path, int] = {}
        self.problem = ""
        """Why the last `watch_only` could not watch a directory that exists; else empty."""

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)

    def watch_only(self, directories: Collection[pathlib.Path]) -> bool:
        """Watch these, and no others any more; returns whether one was not watched before.

        What happened in that one until now is not reported. Directories that do not exist are left
        out, and those for which the user has no watch left (`problem`); one that was removed and
        created again is another.
        """
        has_new, problem = False, ""
        with self._lock:
            for path in self._watched.keys() - directories:
                # Fails where the directory is gone, and its watch with it.
                _libc.inotify_rm_watch(self._descriptor, self._watched.pop(path))
            for path in directories:
                number = _libc.inotify_add_watch(self._descriptor, os.fsencode(path), self._mask)
                if number < 0:
                    self._watched.pop(path, None)
                    if (error := ctypes.get_errno()) not in _MISSING:
                        problem = os.strerror(error)
                elif self._watched.get(path) != number:
                    self._watched[path] = number
                    has_new = True
            self.problem = problem
        return has_new

    def has(self, directory: pathlib.Path) -> bool:
        """Whether the last `watch_only` watched it."""
        return directory in self._watched

    def drain(self) -> None:
        """Read all pending notifications."""
        _drain(self._descriptor)


class FileWatch:
    """Watches the content of one file; its descriptor becomes readable."""

    def __init__(self, path: pathlib.Path) -> None:
        """Raises `OSError`."""
        self._descriptor = _open()
        if _libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_MODIFY) < 0:
            number = ctypes.get_errno()
            os.close(self._descriptor)
            raise OSError(number, os.strerror(number), str(path))

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)

    def drain(self) -> None:
        """Read all pending notifications."""
        _drain(self._descriptor)


def _open() -> int:
    descriptor = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            pass
    except BlockingIOError:
        pass
