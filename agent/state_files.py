"""State files, which survive an agent restart. Functions block; call them from a thread."""

import asyncio
import errno
import math
import os
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import structlog

from agent.logs import Event

Content = bytes | msgspec.Struct | Sequence[msgspec.Struct]
"""Bytes, or what is written as JSON."""

T = TypeVar("T")

log = structlog.get_logger(__name__)

# 1,000 pods with the longest probe specs.
_MAX_BYTES = 64 << 20


def read(path: pathlib.Path, kind: type[T], *, failure: Event) -> T | None:
    """The content of a file of JSON; None if there is none.

    An unusable one also counts as none, and is logged as `failure`.
    """
    try:
        with path.open("rb") as stream:
            return msgspec.json.decode(stream.read(_MAX_BYTES), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # MsgspecError is a ValueError
        log.warning(failure, path=str(path), error=str(error))
        return None


def write(path: pathlib.Path, content: Content, *, failure: Event) -> None:
    """As `replace`; an error is logged as `failure`, as content is that `read` would not read."""
    encoded = content if isinstance(content, bytes) else msgspec.json.encode(content)
    try:
        if len(encoded) > _MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_MAX_BYTES >> 20} MiB")
        replace(path, encoded)
    except OSError as error:
        log.warning(failure, path=str(path), error=str(error))


def replace(path: pathlib.Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace a file in one step, and make its directory if needed. Raises `OSError`.

    A power cut may lose the file: its content is valid for one boot, or can be requested again.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    unfinished.rename(path)


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
