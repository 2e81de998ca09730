"""State files, which survive an agent restart. Functions block; call them from a thread."""

import asyncio
import contextlib
import errno
import math
import os
import pathlib
import stat
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import structlog

from agent import tasks
from agent.logs import Event

Content = bytes | msgspec.Struct | Sequence[msgspec.Struct]
"""Bytes, or what is written as JSON."""

T = TypeVar("T")

log = structlog.get_logger(__name__)

# 1,000 pods with the longest probe specs.
_MAX_BYTES = 64 << 20
# Of what could not be written: a full directory is noticed by people, in minutes.
_RETRY_SECONDS = 5.0


def read(path: pathlib.Path, kind: type[T], *, failure: Event) -> T | None:
    """The content of a file of JSON; None if there is none.

    An unusable one also counts as none, and is logged as `failure`: one that is not a regular file,
    too, as a FIFO or a directory.
    """
    try:
        return msgspec.json.decode(_read(path), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # MsgspecError is a ValueError
        log.warning(failure, path=str(path), error=str(error))
        return None


def _read(path: pathlib.Path) -> bytes:
    """Raises `OSError`. No descriptor outlives it: even one of a deleted directory would keep the
    file system from being remounted read-only."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        # Without `closefd`, since open() raises for a directory and leaves it open.
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read(_MAX_BYTES)
    finally:
        os.close(descriptor)


def has_no_room(error: BaseException | None) -> bool:
    """Whether a file cannot be made since its file system is full or read-only."""
    return isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
    )


class _Unwritten:
    """Content that could not be written, by path: the newest of each, until it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._content: dict[pathlib.Path, tuple[bytes, str]] = {}
        """And the error."""

    def write(self, path: pathlib.Path, content: bytes, *, failure: Event) -> None:
        """Write, and keep what cannot be written; the same error is logged once."""
        with self._lock:
            _, logged = self._content.pop(path, (b"", ""))
            if len(content) > _MAX_BYTES:
                log.warning(failure, path=str(path), error=f"more than {_MAX_BYTES >> 20} MiB")
            elif problem := _problem(path, content):
                self._content[path] = (content, problem)
                if problem != logged:
                    log.warning(failure, path=str(path), error=problem)

    def retry(self) -> None:
        """Write all of it that can be written now."""
        for path in self.paths():
            with self._lock:
                content, problem = self._content.get(path, (b"", ""))
                if problem and not _problem(path, content):
                    del self._content[path]
                    log.info(Event.STATE_WRITTEN, path=str(path))

    def paths(self) -> list[pathlib.Path]:
        return list(self._content)


_unwritten = _Unwritten()


def write(path: pathlib.Path, content: Content, *, failure: Event) -> None:
    """As `replace`; an error is logged as `failure`, as content is that `read` would not read.

    What cannot be written is written by `run`, once there is room.
    """
    encoded = content if isinstance(content, bytes) else msgspec.json.encode(content)
    _unwritten.write(path, encoded, failure=failure)


def unwritten() -> list[pathlib.Path]:
    """Files of this process whose newest content could not be written yet."""
    return _unwritten.paths()


async def run() -> None:
    """Write what `write` could not, until cancelled: a directory may have room again."""
    while True:
        await tasks.tick(_RETRY_SECONDS)
        if unwritten():
            await asyncio.to_thread(_unwritten.retry)


def _problem(path: pathlib.Path, content: bytes) -> str:
    """Replace the file; why that failed, or an empty string."""
    try:
        replace(path, content)
    except OSError as error:
        return str(error)
    return ""


def replace(path: pathlib.Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace a file in one step, and make its directory if needed. Raises `OSError`.

    A power cut may lose the file: its content is valid for one boot, or can be requested again. An
    empty directory in its place, as a container runtime makes it for a mount, is removed.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.new")
    _make_way(unfinished)
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        if path.is_dir():
            path.rmdir()
        unfinished.rename(path)
    except OSError:
        # Half a file would take the room that its next version needs.
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def remove(path: pathlib.Path) -> None:
    """Remove a file, what a killed process left of its next version, and its directory unless that
    has more. Raises `OSError`."""
    for one in (path, path.with_name(f".{path.name}.new")):
        one.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _make_way(path: pathlib.Path) -> None:
    """Remove what a killed process left. Raises `OSError`."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        path.rmdir()


class StateSaver:
    """Keeps a file up to date: writes it soon after each change, and when it is cancelled.

    Changes within `settle_seconds` are one write, and large content is written less often. Writes
    run in a thread, one step each.
    """

    def __init__(
        self,
        path: pathlib.Path,
        content: Callable[[], Content],
        *,
        failure: Event,
        settle_seconds: float,
        bytes_per_second: float = math.inf,
        after: "StateSaver | None" = None,
    ) -> None:
        """content: makes the file's content, on the event loop; a struct is encoded in the thread,
        so it must not change any more. failure: logs that it cannot be written. bytes_per_second:
        the most that changes without an end cause. after: its changes are written first, so its
        file is never older than this one."""
        self._path = path
        self._content = content
        self._failure = failure
        self._settle_seconds = settle_seconds
        self._bytes_per_second = bytes_per_second
        self._after = after
        self._changed = asyncio.Event()
        self._writes = 0
        """That have started, and are not done."""
        self._lock = threading.Lock()
        self._made = 0
        self._written = 0

    def mark(self) -> None:
        """The content has changed."""
        self._changed.set()

    async def save(self) -> int:
        """Write now. Returns the number of bytes when they are written."""
        self._changed.clear()
        content = self._next()
        # If this is cancelled the write counts as not done.
        self._writes += 1
        if self._after:
            await self._after.save_changes()
        size = await asyncio.to_thread(self._write, *content)
        self._writes -= 1
        return size

    async def save_changes(self) -> int:
        """The same if a change is not written."""
        return await self.save() if self._has_changes else 0

    async def run(self) -> None:
        """Write after each change until cancelled; then once more if a change is not written."""
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(self._settle_seconds)
                size = await self.save_changes()
                await asyncio.sleep(size / self._bytes_per_second)
        finally:
            if self._has_changes:
                self._write(*self._next())

    @property
    def _has_changes(self) -> bool:
        return self._changed.is_set() or self._writes > 0

    def _next(self) -> tuple[int, Content]:
        self._made += 1
        return self._made, self._content()

    def _write(self, number: int, content: Content) -> int:
        """Write, unless newer content is written: cancelling `run` does not stop its thread.
        Returns the number of bytes."""
        encoded = content if isinstance(content, bytes) else msgspec.json.encode(content)
        with self._lock:
            if number >= self._written:
                self._written = number
                write(self._path, encoded, failure=self._failure)
        return len(encoded)
