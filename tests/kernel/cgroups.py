"""Cgroups that a test makes for itself, and processes in them; all gone afterwards."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import subprocess
from collections.abc import Iterator, Sequence

from agent.linux.cgroups import cgroup2_mount
from tests.nodes import node
from tests.polling import PATIENCE

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

    @property
    def level(self) -> int:
        """Of the root: 0."""
        return self.path.count("/")

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


def root() -> Cgroup:
    """Of the machine, for what looks only near it."""
    mount = cgroup2_mount()
    assert mount is not None, "no cgroup v2 is mounted"
    return Cgroup(mount, "")


def unique(name: str) -> str:
    """A cgroup's name for the machine's root, which no other run has or has left there."""
    return f"podgate-test-{os.getpid()}-{name}"


@contextlib.contextmanager
def cgroup(name: str = "", *, below: Cgroup | None = None) -> Iterator[Cgroup]:
    """A new cgroup, below the node's or another of these; its processes end with it."""
    name = name or unique(str(next(_numbers)))
    if below is None:
        below = Cgroup(node.current.cgroup, node.current.path) if node.current else root()
    path = f"{below.path}/{name}"
    made = Cgroup(below.directory / name, path)
    made.directory.mkdir()
    try:
        yield made
    finally:
        remove(made)


def remove(made: Cgroup) -> None:
    """End the cgroup's processes, all of them the test's, and remove it; it may be gone already."""
    if made.directory.is_dir():
        node.remove_cgroup(made.directory)
