"""`podgate off --node` as marks on the node: it works without an agent, and each later agent
follows it.

There are two, each of which is enough: a file in the run directory, which a user can make with
`touch`, and a directory in the BPF file system, which is kernel memory and so has room when the run
directory is full or read-only. A reboot removes both: what lasts longer is a label of the node.
"""

import os
import pathlib

from agent.errors import PodgateError
from agent.linux import directory_changes
from agent.pods.pod_modes import PodModes
from bpf import pins

_NAME = "off"
# While the directories cannot be watched, and while they can: another directory may have come in
# the place of one of them.
_POLL_SECONDS, _PERIOD_SECONDS = 0.5, 4.0


class OffMarksError(PodgateError):
    """The marks cannot be set or removed; the message has the cause."""


def file(run_directory: pathlib.Path) -> pathlib.Path:
    """The mark in the run directory."""
    return run_directory / _NAME


def directory(installation: pins.Pins) -> pathlib.Path:
    """The mark in the BPF file system; podgate-cni reads it, too (deploy/cni/podgate-cni.c)."""
    return installation.root / _NAME


def are_set(run_directory: pathlib.Path, installation: pins.Pins) -> bool:
    """Whether there is one. Blocks for two system calls."""
    return os.path.lexists(directory(installation)) or os.path.lexists(file(run_directory))


def put_in_kernel(installation: pins.Pins) -> None:
    """Set the mark in the BPF file system, which waits for no disk. Raises `OSError`."""
    if not pins.is_bpffs(installation.bpffs):
        raise FileNotFoundError(None, "it is not a BPF file system")
    directory(installation).mkdir(mode=0o700, parents=True, exist_ok=True)


def put(run_directory: pathlib.Path, installation: pins.Pins) -> None:
    """Set both marks. Raises `OffMarksError` if neither can be set."""
    problems = []
    try:
        put_in_kernel(installation)
    except OSError as error:
        problems.append(f"{installation.bpffs}: {error.strerror}")
    try:
        run_directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not os.path.lexists(file(run_directory)):
            file(run_directory).touch(mode=0o644)
    except OSError as error:
        problems.append(f"{run_directory}: {error.strerror}")
    if len(problems) == 2:
        raise OffMarksError(
            f"this cannot be kept, so an agent attaches gates again: {'; '.join(problems)}."
        )


def remove(run_directory: pathlib.Path, installation: pins.Pins) -> None:
    """Remove both marks. Raises `OffMarksError` if one is left."""
    problems = []
    for path in (directory(installation), file(run_directory)):
        # Of a missing one in a read-only file system unlink(2) reports that it is read-only.
        if not os.path.lexists(path):
            continue
        try:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path} cannot be removed ({error.strerror})")
    if problems:
        raise OffMarksError(f"podgate stays off on this node: {'; '.join(problems)}.")


class OffMarks:
    """Sets the node's ceiling to off while there is a mark."""

    def __init__(
        self, run_directory: pathlib.Path, installation: pins.Pins, modes: PodModes
    ) -> None:
        self._run_directory = run_directory
        self._installation = installation
        self._modes = modes

    def are_set(self) -> bool:
        """Whether there is one now. Blocks for two system calls."""
        return are_set(self._run_directory, self._installation)

    def read(self) -> None:
        """Blocks for two system calls; for the start, before all that acts on modes."""
        self._modes.set_off(is_off=self.are_set())

    async def run(self) -> None:
        """Follow the marks until cancelled."""
        async for is_off in directory_changes.read(
            self._run_directory,
            directory(self._installation).parent,
            read=self.are_set,
            at_least_every_seconds=_PERIOD_SECONDS,
            poll_seconds=_POLL_SECONDS,
        ):
            self._modes.set_off(is_off=is_off)
