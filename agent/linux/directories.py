"""Directories that only this process' user, root, can change or enter.

In a directory of another user, names can be exchanged at any time: sockets, saved state and locks
there would be that user's.
"""

import os
import pathlib
import stat

from agent.errors import PodgateError

_FOR_OTHERS = 0o077
_WRITABLE_BY_OTHERS = 0o022


class DirectoryError(PodgateError):
    """A directory belongs to another user, or others have rights there that they must not have."""


def ensure_own(path: pathlib.Path) -> None:
    """Make a directory that every user may enter, or check that only this user can change it.

    Raises `DirectoryError`, and `OSError` if it cannot be made.
    """
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    _check(path, path.stat(), _WRITABLE_BY_OTHERS)


def open_private(path: pathlib.Path) -> int:
    """A descriptor of a directory that only this user enters; it is made in its parent if it is
    missing.

    No other user can have opened it before: it has had this mode since it was made. Raises
    `DirectoryError` and `OSError`.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(descriptor), _FOR_OTHERS)
    except DirectoryError:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: pathlib.Path, status: os.stat_result, forbidden: int) -> None:
    if status.st_uid != os.geteuid():
        raise DirectoryError(
            f"{path} belongs to user {status.st_uid} and not to root, so it is not used; remove "
            "it, or choose another directory."
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & forbidden:
        raise DirectoryError(
            f"{path} is open to other users (mode {mode:04o}), so it is not used; remove it, or "
            "choose another directory."
        )
