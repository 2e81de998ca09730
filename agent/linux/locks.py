"""Locks: one agent per run directory and per BPF file system."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from agent.errors import PodgateError


class AlreadyRunningError(PodgateError):
    """Another agent holds the lock."""


@contextlib.contextmanager
def exclusive(directory: pathlib.Path) -> Iterator[None]:
    """Hold a directory's lock; the kernel releases it when the process ends for any reason.

    Raises `AlreadyRunningError` when another agent holds it.
    """
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise AlreadyRunningError(
            f"another agent is running with {directory}; stop it first, or name other directories "
            "with --run-directory and --bpffs."
        ) from error
    try:
        yield
    finally:
        os.close(lock)


def exclusive_if_present(
    directory: pathlib.Path,
) -> contextlib.AbstractContextManager[None]:
    """As `exclusive` if the directory exists; otherwise no process can be using it."""
    return exclusive(directory) if directory.is_dir() else contextlib.nullcontext()


def is_held(directory: pathlib.Path) -> bool:
    """Whether another process holds a directory's lock; not of one that does not exist."""
    try:
        with exclusive(directory):
            return False
    except AlreadyRunningError:
        return True
    except OSError:
        return False
