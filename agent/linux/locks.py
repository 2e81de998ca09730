"""One agent for each run directory and each BPF file system."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from agent.errors import PodgateError


class Locked(PodgateError):
    """Another agent holds it; the message says what to do."""


@contextlib.contextmanager
def exclusive(directory: pathlib.Path) -> Iterator[None]:
    """Hold a directory's lock; the kernel drops it however the process ends.

    Raises `Locked` when another agent holds it.
    """
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise Locked(
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
    """As `exclusive`, where the directory exists; where it does not, nobody can be using it."""
    return exclusive(directory) if directory.is_dir() else contextlib.nullcontext()
