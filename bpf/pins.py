"""Where everything is pinned: `<bpffs>/podgate/v<schema>/{maps,progs,links}/`.

Programs lie in a directory named by the hash of their source, renamed into place only when all of
them are there, so a half-finished load is never taken for a whole one and two versions can lie side
by side during an upgrade.
"""

import contextlib
import ctypes
import os
import pathlib
import shutil

from bpf import abi, errors

DEFAULT_BPFFS = "/sys/fs/bpf"

_BPF_FS_MAGIC = 0xCAFE4A11
_libc = ctypes.CDLL(None, use_errno=True)


class Pins:
    """The paths of one installation, for one schema."""

    def __init__(self, bpffs: str | os.PathLike[str] = DEFAULT_BPFFS) -> None:
        self.bpffs = pathlib.Path(bpffs)
        self.root = self.bpffs / "podgate"
        self.schema = self.root / f"v{abi.SCHEMA}"
        self.maps = self.schema / "maps"
        self.programs = self.schema / "progs"
        self.links = self.schema / "links"

    def map(self, spec: abi.MapSpec) -> str:
        return str(self.maps / spec.name)

    def link(self, program: str, ifindex: int) -> str:
        return str(self.links / f"{program}-{ifindex}")

    def prepare(self) -> None:
        """Make the directories. Raises `PinError` where nothing can be pinned."""
        if not is_bpffs(self.bpffs):
            raise errors.PinError(
                f"{self.bpffs} is not a BPF file system; mount one with "
                f"'mount -t bpf bpf {self.bpffs}' or name another with --bpffs"
            )
        try:
            for directory in (self.maps, self.programs, self.links):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise errors.PinError(
                f"cannot write below {self.bpffs} ({error.strerror}); "
                "podgate needs it mounted read-write"
            ) from error

    def discard_other_programs(self, source_hash: str) -> None:
        """Unpin programs of other sources, half-finished loads included. Links keep theirs."""
        for directory in self.programs.iterdir():
            if directory.name != source_hash:
                shutil.rmtree(directory)

    def linked_ifindexes(self, program: str) -> list[int]:
        """Interfaces for which a link of `program` is pinned, whether or not they still exist."""
        prefix = f"{program}-"
        return sorted(
            int(path.name.removeprefix(prefix))
            for path in self.links.iterdir()
            if path.name.startswith(prefix) and path.name.removeprefix(prefix).isdecimal()
        )

    def remove_everything(self) -> int:
        """Unpin all that podgate ever pinned here, of every schema; how many pins there were.

        The kernel detaches a link when its last pin and descriptor are gone.
        """
        count = 0
        for directory, _, files in os.walk(self.root, topdown=False):
            for name in files:
                os.unlink(os.path.join(directory, name))
                count += 1
            os.rmdir(directory)
        return count


def is_bpffs(path: str | os.PathLike[str]) -> bool:
    """Whether `path` exists and lies on a BPF file system (statfs(2))."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs has 120 bytes on 64-bit
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    magic = ctypes.c_long.from_buffer(buffer).value
    return magic & 0xFFFFFFFF == _BPF_FS_MAGIC


def unlink_quietly(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
