"""Processes that tests and benches start beside them, and talk to by pipes."""

import contextlib
import json
import pathlib
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

BARE_PYTHON = (sys.executable, "-S")
"""An interpreter for scripts that import the standard library only: it starts in 11 ms of CPU time
instead of 30, since it does not set up packages.
"""


@contextlib.contextmanager
def served(command: Sequence[str]) -> Iterator[int]:
    """A process that prints when it is ready, and exits when its input ends; yields its pid."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()


def request(process: "subprocess.Popen[bytes]", command: dict[str, Any]) -> Any:
    """A process's response to a command; both are one line of JSON."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(command).encode() + b"\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process cannot open anything in the block; what is open stays open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def waited_ns(*processes: str) -> int:
    """For how long the main threads of these processes were ready to run and had no processor, in
    all; 0 for those that have ended. On a busy machine whatever they do is late by that.

    processes: numbers, or "thread-self". Source: Documentation/scheduler/sched-stats.rst.
    """
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            total += int(pathlib.Path(f"/proc/{process}/schedstat").read_bytes().split()[1])
    return total
