"""Locks: one agent per run directory and per BPF file system, one proxy per run directory.

flock(2) needs a descriptor that reads, and nothing else. So any process that can open a thing can
hold its lock: what is locked here is a directory of mode 0700, which only root opens. It is a
directory and no file because a BPF file system has no files.
"""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from agent.errors import PodgateError
from agent.linux import directories
from agent.linux.procfs import Procfs

_NAME = "lock"
_TRIES = 3


class AlreadyRunningError(PodgateError):
    """Another process holds the lock."""


class LockError(PodgateError):
    """The lock cannot be made."""


def lock_of(directory: pathlib.Path) -> pathlib.Path:
    """What `exclusive` locks."""
    return directory / _NAME


@contextlib.contextmanager
def exclusive(directory: pathlib.Path) -> Iterator[None]:
    """Hold the lock of a run directory, or of podgate's directory in a BPF file system.

    The kernel releases it when the process ends for any reason. Raises `AlreadyRunningError` when
    another agent holds it, `DirectoryError`, and `LockError` where nothing can be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(lock_of(directory)))
            stack.enter_context(_previous_lock(directory))
        except AlreadyRunningError as error:
            raise AlreadyRunningError(
                f"another agent is running with {directory}; stop it first, or name other "
                "directories with --run-directory and --bpffs."
            ) from error
        yield


@contextlib.contextmanager
def exclusive_if_present(directory: pathlib.Path) -> Iterator[None]:
    """As `exclusive` if the directory exists; otherwise no process can be using it.

    A lock that cannot be made, as on a full disk, is one that no process holds.
    """
    with contextlib.ExitStack() as stack:
        if directory.is_dir():
            try:
                stack.enter_context(exclusive(directory))
            except LockError:
                stack.enter_context(_previous_lock(directory))
        yield


@contextlib.contextmanager
def held(lock: pathlib.Path) -> Iterator[int]:
    """Hold one lock, a directory of its own; yields its descriptor.

    Raises `AlreadyRunningError` when another process holds it, `FileNotFoundError` without the
    directory that it is in, `DirectoryError` and `LockError`.
    """
    while True:
        try:
            descriptor = directories.open_private(lock)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise LockError(
                f"the lock {lock} cannot be made ({error.strerror}); make room there, and remount "
                "what is read-only."
            ) from error
        try:
            if not _take(descriptor):
                raise AlreadyRunningError(f"another process holds the lock {lock}.")
            # Its previous holder may have removed it.
            if is_current(lock, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def is_current(lock: pathlib.Path, descriptor: int) -> bool:
    """Whether this still is the directory of that name, so that others find it locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _previous_lock(directory: pathlib.Path) -> Iterator[None]:
    """The lock of versions that locked the directory itself, so that a roll-out from or to one of
    them never runs two agents.

    Any process may hold it, so it counts only where a process of root does, as an agent is.
    """
    descriptor = os.open(directory, os.O_DIRECTORY)
    try:
        for _ in range(_TRIES):
            if _take(descriptor):
                break
            # None if it has just ended, or is in another pid namespace.
            if users := _holders(descriptor):
                if {0} in users:
                    raise AlreadyRunningError(
                        f"an agent of a previous version has locked {directory}."
                    )
                break
        yield
    finally:
        os.close(descriptor)


def is_held(directory: pathlib.Path) -> bool:
    """Whether another process holds the lock of a directory; not of one that does not exist."""
    try:
        with exclusive_if_present(directory):
            return False
    except AlreadyRunningError:
        return True
    except (OSError, directories.DirectoryError):
        return False


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holders(descriptor: int) -> list[set[int]]:
    """The users of each process that holds the lock and has not exited."""
    status = os.fstat(descriptor)
    file = os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
    procfs = Procfs()
    return [users for pid in procfs.lock_holders(*file) if (users := set(procfs.users(pid)))]
