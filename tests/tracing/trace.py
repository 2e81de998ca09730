"""Follows one thing through podgate's processes: which functions handle it, in which order."""

import contextlib
import dataclasses
import json
import mmap
import os
import pathlib
from collections.abc import Iterator

_SIZE = mmap.PAGESIZE


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A call or a return that handled the thing. at: nanoseconds of CLOCK_MONOTONIC; stack: file
    and function of the frames of podgate, the innermost first."""

    at: int
    stack: tuple[tuple[str, str], ...]


class Trace:
    """Of the processes that start within `recording`."""

    def __init__(self, directory: pathlib.Path, code: pathlib.Path) -> None:
        """directory: of this trace alone; code: where the processes of a run keep the code that
        they compile for it."""
        self._directory = directory
        self._code = code
        self._pattern = directory / "pattern"
        self._pattern.write_bytes(bytes(_SIZE))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Set the environment of the processes that are started in the block."""
        ours = {
            "PYTHONPATH": str(pathlib.Path(__file__).parent / "hook"),
            "PODGATE_TEST_TRACE": str(self._directory),
            "PODGATE_TEST_TRACED_CODE": str(self._code),
        }
        before = dict(os.environ)
        os.environ.update(ours)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    @contextlib.contextmanager
    def following(self, pattern: str) -> Iterator[list[Entry]]:
        """Record what matches this regular expression; the list is filled when the block ends."""
        found: list[Entry] = []
        known = len(self._entries())
        self._follow(pattern)
        try:
            yield found
        finally:
            self._follow("")
        found += self._entries()[known:]

    def has(self, path: str) -> bool:
        """Whether a function of this file is in an entry so far."""
        return any(path == file for entry in self._entries() for file, _ in entry.stack)

    def _follow(self, pattern: str) -> None:
        with self._pattern.open("r+b") as file:
            file.write(pattern.encode().ljust(_SIZE, b"\0"))

    def _entries(self) -> list[Entry]:
        """All so far, in the order of time."""
        lines = [
            json.loads(line)
            for path in self._directory.glob("*.jsonl")
            # What is behind the last newline is still being written.
            for line in path.read_bytes().rpartition(b"\n")[0].splitlines()
        ]
        found = [Entry(line["at"], tuple(map(tuple, line["stack"]))) for line in lines]
        return sorted(found, key=lambda entry: entry.at)
