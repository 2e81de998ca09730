"""A process of the node that tries to reach pods while they start."""

import contextlib
import pathlib
import socket
import threading
from typing import Self


class HostProcess:
    """Connects to each address that pods have, in a tight loop, from the node."""

    def __init__(self, addresses: pathlib.Path, port: int, connect_seconds: float) -> None:
        """addresses: the directory in which host-local has a file for each one in use;
        connect_seconds: how long it waits for an answer of one."""
        self.reached: set[str] = set()
        self.tried: set[str] = set()
        self.attempts = 0
        self._addresses = addresses
        self._port = port
        self._connect_seconds = connect_seconds
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host process")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(0.001):
            for file in self._addresses.glob("*.*.*.*"):
                self.tried.add(file.name)
                self.attempts += 1
                target = file.name, self._port
                with contextlib.suppress(OSError):
                    socket.create_connection(target, self._connect_seconds).close()
                    self.reached.add(file.name)
