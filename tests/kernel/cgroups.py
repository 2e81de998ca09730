"""Cgroups that a test makes for itself, and processes in them; all gone afterwards."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from agent.linux.cgroups import cgroup2_mount
from tests.polling import PATIENCE

_LIMIT_SECONDS = 20
# Longer than any process waits for a connection (tests.kernel.traffic).
_RUN_SECONDS = 90 * PATIENCE
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class Cgroup:
    """One cgroup of version 2: its directory, and its path as /proc/PID/cgroup shows it."""

    directory: pathlib.Path
    path: str

    @property
    def id(self) -> int:
        return self.directory.stat().st_ino

    def add(self, pid: int) -> None:
        """Move a process in; its sockets stay what they were."""
        (self.directory / "cgroup.procs").write_text(str(pid))

    def popen(
        self,
        arguments: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
    ) -> "subprocess.Popen[bytes]":
        """Start a process that is in the cgroup before its first instruction."""
        procs = self.directory / "cgroup.procs"
        return subprocess.Popen(
            ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(procs), *arguments],
            stdin=stdin,
            stdout=stdout,
        )

    def run(self, arguments: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
        """Run a process in the cgroup to its end, for `_RUN_SECONDS` at most."""
        procs = self.directory / "cgroup.procs"
        return subprocess.run(
            ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(procs), *arguments],
            capture_output=True,
            timeout=_RUN_SECONDS,
            check=False,
        )


@contextlib.contextmanager
def cgroup(name: str = "", *, below: Cgroup | None = None) -> Iterator[Cgroup]:
    """A new cgroup, below the root or another of these; its processes end with it."""
    mount = cgroup2_mount()
    assert mount is not None, "no cgroup v2 is mounted"
    name = name or f"podgate-test-{os.getpid()}-{next(_numbers)}"
    path = f"{below.path if below else ''}/{name}"
    made = Cgroup(mount / path[1:], path)
    made.directory.mkdir()
    try:
        yield made
    finally:
        remove(made)


def _kill_all(made: Cgroup) -> None:
    """By one write where the kernel has that (Linux 5.14), else one by one until none is left."""
    kill = made.directory / "cgroup.kill"
    if kill.exists():
        kill.write_text("1")
        return
    while pids := (made.directory / "cgroup.procs").read_text().split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def remove(made: Cgroup) -> None:
    """End the cgroup's processes, all of them the test's, and remove it; it may be gone already."""
    if not made.directory.is_dir():
        return
    with open(made.directory / "cgroup.events", "rb", buffering=0) as events:
        _kill_all(made)
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        deadline = time.monotonic() + _LIMIT_SECONDS
        while b"populated 1" in os.pread(events.fileno(), 4096, 0):
            assert time.monotonic() < deadline, f"{made.directory} does not become empty"
            poll.poll(200)
    made.directory.rmdir()
