"""What the tests of a worker share, made once and before their nodes are forked off."""

import asyncio
import fcntl
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Collection

from bpf import artefacts, compiling, errors, features, syscalls
from bpf.compiler import PROGRAM_SETS
from bpf.program_sets import ProgramSet
from tests.forkserver import ForkServer
from tests.nodes import node
from tests.nodes.installation import Installation

OFFERS = ("moving_copies", "loaded", "installed", "installed_pins", "launch")
"""Fixtures for which a worker makes something before it forks."""

CGROUPS = "podgate-tests-"
"""What the cgroup of each worker begins with."""
RUN = "PODGATE_TEST_RUN"
"""The variable with what follows it, for a run in a PID namespace of its own."""


class Worker:
    """The base of a worker's nodes. close: ends all of them."""

    def __init__(self, directory: pathlib.Path) -> None:
        """Moves the process to the base. directory: of the run, for all of its workers.

        To be made while the process has one thread. Raises `OSError` and `errors.BpfError`.
        """
        node.make_base()
        syscalls.next_id(syscalls.Command.PROG_GET_NEXT_ID, 0)
        self.cgroup = f"{CGROUPS}{os.environ.get(RUN, '')}{os.getpid()}"
        """Of all nodes of the worker."""
        self._directory = directory
        self._shared: Installation | None = None
        self._installed: Installation | None = None
        self._fork_server: ForkServer | None = None
        self._offered: set[str] = set()
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.reaper", self.cgroup],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def prebuilt_programs(self) -> pathlib.Path:
        """A directory of compiled programs as an image has them, which this process and all that it
        starts use: one compile for all workers of a run. Where the environment names one already,
        it is used."""
        if given := os.environ.get(artefacts.DIRECTORY_VARIABLE):
            return pathlib.Path(given)
        made = self.made_once("programs", _compile)
        os.environ[artefacts.DIRECTORY_VARIABLE] = str(made)
        return made

    def made_once(self, name: str, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
        """A file or directory that the first worker makes for all workers of the run."""
        made = self._directory / name
        with (self._directory / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                unfinished = self._directory / f"{name}-unfinished"
                make(unfinished)
                unfinished.rename(made)
        return made

    def shared(self) -> Installation:
        """For all tests that need no other, and no agent. Only before the unit of the test is
        forked off, its maps may be restored."""
        if self._shared is None:
            self.prebuilt_programs()
            self._shared = Installation(node.SHARED)
        return self._shared

    def installed(self) -> Installation:
        """For agents."""
        if self._installed is None:
            self.prebuilt_programs()
            self._installed = Installation(node.INSTALLED)
        return self._installed

    def fork_server(self) -> ForkServer:
        """For agents that need not import podgate first."""
        if self._fork_server is None:
            self.prebuilt_programs()
            self._fork_server = ForkServer()
        return self._fork_server

    def offer(self, fixtures: Collection[str]) -> None:
        """Make what these of `OFFERS` stand for, and restore what exists already."""
        if "moving_copies" in fixtures:
            self.shared().load_moving_copies()
        if "loaded" in fixtures:
            self.shared().restore()
        if {"installed", "installed_pins"} & {*fixtures}:
            self.installed().restore()
        if "launch" in fixtures:
            self.fork_server()
        self._offered |= {*fixtures}

    def offers(self) -> frozenset[str]:
        """Those of `OFFERS` that a fork of this process has."""
        return frozenset(self._offered)

    def close(self) -> None:
        for installation in (self._shared, self._installed):
            if installation is not None:
                installation.close()
        if self._fork_server is not None:
            self._fork_server.close()
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        assert self._reaper.wait(timeout=120) == 0, "cgroups or processes of the tests are left"


def _compile(directory: pathlib.Path) -> None:
    directory.mkdir()
    asyncio.run(_compile_all(directory))


async def _compile_all(directory: pathlib.Path) -> None:
    async def compile_set(programs: ProgramSet) -> None:
        used = features.offered(programs.features)
        artefact = await compiling.compile_in_process(programs, used)
        artefacts.path(directory, programs, used).write_bytes(artefact.encode())

    await asyncio.gather(*map(compile_set, PROGRAM_SETS))


def problem_of(error: OSError) -> str:
    """One sentence: what the machine lacks for kernel tests."""
    if isinstance(error, errors.BpfError):
        return f"kernel tests need a kernel with BPF and the right to use it ({error.strerror})"
    return f"kernel tests need root and a kernel with namespaces and BPF ({error.strerror})"
