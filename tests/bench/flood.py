"""What a flood by one user costs the agent: figures of the bench `localapi`.

The server runs in a process of its own, which reports its CPU time; the flood comes from this one.
"""

import asyncio
import logging
import pathlib
import resource
import subprocess
import sys
import time

import structlog

from tests.agent.api import flood
from tests.agent.api.podinfo.serving import Node, directory_for_all
from tests.bench import figures

_PODS = 110
_SECONDS = 5.0
# What each user may send at once is over by then.
_WARM_UP_SECONDS = 8.0
_MESSAGES = 10_000_000
_CONNECTIONS = "connections"


def run() -> None:
    """All kinds of floods, each against a new server."""
    for kind in (*flood.FLOODS, _CONNECTIONS):
        figures.emit("localapi", f"flood_{kind}_cpu_percent", [_measure(kind)], "%")


def _measure(kind: str) -> float:
    """Of one core, once the burst that each user has is over."""
    with directory_for_all() as directory, _Server(directory) as server:
        _flood(kind, server.path, _WARM_UP_SECONDS)
        before, began = server.cpu_seconds(), time.monotonic()
        _flood(kind, server.path, _SECONDS)
        return 100 * (server.cpu_seconds() - before) / (time.monotonic() - began)


def _flood(kind: str, path: pathlib.Path, seconds: float) -> None:
    if kind == _CONNECTIONS:
        flood.Connections(path).run(count=_MESSAGES, seconds=seconds)
    else:
        flood.Flood(path, flood.FLOODS[kind]).run(count=_MESSAGES, seconds=seconds)


class _Server:
    """The process with the server."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.flood", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.path = pathlib.Path(self._answer())

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def cpu_seconds(self) -> float:
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


async def _serve(directory: pathlib.Path) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    node = Node(directory)
    for number in range(_PODS):
        node.add(f"pod{number}")
    async with node.serving():
        sys.stdout.write(f"{node.path}\n")
        sys.stdout.flush()
        while await asyncio.to_thread(sys.stdin.readline):
            used = resource.getrusage(resource.RUSAGE_SELF)
            sys.stdout.write(f"{used.ru_utime + used.ru_stime}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(pathlib.Path(sys.argv[1])))
