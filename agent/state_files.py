"""State files, which survive an agent restart. Functions block; call them from a thread."""

import asyncio
import os
import pathlib
import threading
from collections.abc import Callable

import msgspec

Content = bytes | msgspec.Struct
"""Bytes, or a struct that is written as JSON."""


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

    Changes within `settle_seconds` are one write. Writes run in a thread, one step each.
    """

    def __init__(
        self,
        path: pathlib.Path,
        content: Callable[[], Content],
        *,
        on_error: Callable[[OSError], None],
        settle_seconds: float,
    ) -> None:
        """content: makes the file's content, on the event loop; a struct is encoded in the thread,
        so it must not change any more. on_error: is called in a thread."""
        self._path = path
        self._content = content
        self._on_error = on_error
        self._settle_seconds = settle_seconds
        self._changed = asyncio.Event()
        self._is_writing = False
        self._lock = threading.Lock()
        self._made = 0
        self._written = 0

    def mark(self) -> None:
        """The content has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Write after each change until cancelled; then once more if a change is not written."""
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(self._settle_seconds)
                self._changed.clear()
                self._is_writing = True
                await asyncio.to_thread(self._write, *self._next())
                self._is_writing = False
        finally:
            if self._changed.is_set() or self._is_writing:
                self._write(*self._next())

    def _next(self) -> tuple[int, Content]:
        self._made += 1
        return self._made, self._content()

    def _write(self, number: int, content: Content) -> None:
        """Write, unless newer content is written: cancelling `run` does not stop its thread."""
        encoded = content if isinstance(content, bytes) else msgspec.json.encode(content)
        with self._lock:
            if number < self._written:
                return
            self._written = number
            try:
                replace(self._path, encoded)
            except OSError as error:
                self._on_error(error)
