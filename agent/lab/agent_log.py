"""The log file of a lab's agent: its events, and waiting for them.

A file and not a pipe: an agent never waits for a reader, and what it logged outlives both.
"""

import contextlib
import json
import pathlib
import select
from collections.abc import Iterator
from typing import Any

from agent.linux.inotify import FileWatch
from agent.logs import Event

Line = dict[str, Any]


class AgentLog:
    """Lines of all agents that wrote to one file."""

    def __init__(self, path: pathlib.Path) -> None:
        """path: created here, if it does not exist."""
        self.path = path
        path.touch()
        self._read_bytes = 0
        self._unfinished = b""
        self._lines: list[Line] = []
        self._returned: dict[str, int] = {}

    def lines(self, event: Event | None = None) -> list[Line]:
        """Decoded lines: all, or those of one event."""
        self._refresh()
        return [line for line in self._lines if event is None or line["event"] == event.key]

    def next(self, event: Event, fields: Line) -> Line | None:
        """The first line of this event with these fields that no such call has returned yet."""
        self._refresh()
        query = f"{event.key} {json.dumps(fields, sort_keys=True)}"
        for number in range(self._returned.get(query, 0), len(self._lines)):
            line = self._lines[number]
            if line["event"] == event.key and fields.items() <= line.items():
                self._returned[query] = number + 1
                return line
        return None

    def tail(self) -> str:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        return " / ".join(text.splitlines()[-3:]) or "none"

    @contextlib.contextmanager
    def watch(self) -> Iterator["LogWatch"]:
        """Notice what is written in the block."""
        with contextlib.closing(FileWatch(self.path)) as watch:
            yield LogWatch(watch)

    def _refresh(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            content = file.read()
        self._read_bytes += len(content)
        *whole, self._unfinished = (self._unfinished + content).split(b"\n")
        for text in whole:
            with contextlib.suppress(ValueError):  # a traceback, or a program that the agent runs
                line = json.loads(text)
                if isinstance(line, dict) and "event" in line:
                    self._lines.append(line)


class LogWatch:
    """Waits for writes to a log."""

    def __init__(self, watch: FileWatch) -> None:
        self._watch = watch
        self._poll = select.poll()
        self._poll.register(watch, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Return when something was written since the last call, or after `seconds`: whether it
        was."""
        if not self._poll.poll(max(0, 1000 * seconds)):
            return False
        self._watch.drain()
        return True
