"""Records on standard output, one line each, for what collects the logs of containers or units."""

import os
import select
from collections.abc import Sequence

import msgspec

from agent.flows.records import Record

_STANDARD_OUTPUT = 1


class StandardOutput:
    """Blocks while its reader does."""

    def __init__(self, descriptor: int = _STANDARD_OUTPUT) -> None:
        self._descriptor = descriptor

    def send(self, records: Sequence[Record]) -> None:
        lines = memoryview(b"".join(msgspec.json.encode(one) + b"\n" for one in records))
        while lines:
            try:
                lines = lines[os.write(self._descriptor, lines) :]
            except BlockingIOError:  # another program with this pipe has made it so
                select.select([], [self._descriptor], [])

    def close(self) -> None:
        """It is the process's own."""
