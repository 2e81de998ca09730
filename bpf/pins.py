"""The paths of pinned objects: `<bpffs>/podgate/v<schema>/{maps,progs,links}/`.

Programs are in a directory named by their sources' hash, which is renamed into place only when it
is complete. So an unfinished load is never used, and two versions can exist during an upgrade.

Another schema's directory belongs to the previous version, or to a later one that was rolled back.
Its links use its maps until they are taken over (`find_links`, `adopt`); then the directory is
removed (`discard_schema`).
"""

import contextlib
import ctypes
import errno
import os
import pathlib
import re
import stat
from collections.abc import Iterator

from bpf import abi, errors, map_specs, syscalls

DEFAULT_BPFFS = "/sys/fs/bpf"

# Suffix of the name of a link that is about to replace the one at `Pins.link`, and of the directory
# of the programs that such links run.
MOVING = "-moving"

# A compile process makes one directory, and renames it once.
_REMOVE_ATTEMPTS = 4
# Another user has to make two directories between two system calls, each of these times.
_CLAIM_ATTEMPTS = 100

_BPF_FS_MAGIC = 0xCAFE4A11
_libc = ctypes.CDLL(None, use_errno=True)


class Pins:
    """The paths of one installation, for one schema."""

    def __init__(
        self, bpffs: str | os.PathLike[str] = DEFAULT_BPFFS, schema: int = abi.SCHEMA
    ) -> None:
        self.bpffs = pathlib.Path(bpffs)
        self.root = self.bpffs / "podgate"
        self.schema = self.root / f"v{schema}"
        self.maps = self.schema / "maps"
        self.programs = self.schema / "progs"
        self.links = self.schema / "links"

    def map(self, spec: map_specs.MapSpec) -> str:
        return str(self.maps / spec.name)

    def link(self, program: str, ifindex: int) -> str:
        return str(self.links / f"{program}-{ifindex}")

    def prepare(self) -> None:
        """Create the directories. Raises `PinError` where pinning is impossible."""
        if not is_bpffs(self.bpffs):
            raise errors.PinError(
                f"{self.bpffs} is not a BPF file system; mount one with "
                f"'mount -t bpf bpf {self.bpffs}' or name another with --bpffs"
            )
        try:
            _claim(self.root)
            for directory in (self.maps, self.programs, self.links):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise errors.PinError(
                f"cannot write below {self.bpffs} ({error.strerror}); "
                "podgate needs it mounted read-write"
            ) from error

    def moving_copies(self, source_hash: str) -> pathlib.Path:
        """The directory of the programs that are loaded when a gate moves for the first time."""
        return self.programs / (source_hash + MOVING)

    def discard_other_programs(self, source_hash: str) -> None:
        """Unpin programs of other sources and unfinished loads. Links keep their programs."""
        current = (source_hash, self.moving_copies(source_hash).name)
        for directory in self.programs.iterdir():
            if directory.name not in current:
                _remove_tree(directory)

    def other_schemas(self) -> list[pathlib.Path]:
        """Directories of other schemas, the newest first."""
        return sorted(
            (
                path
                for path in self.root.glob("v*")
                if path.name[1:].isdecimal() and path != self.schema
            ),
            key=lambda path: int(path.name[1:]),
            reverse=True,
        )

    def find_links(self, name: str) -> list[pathlib.Path]:
        """Pins of links of this name: this schema's first, then others'."""
        paths = (schema / "links" / name for schema in (self.schema, *self.other_schemas()))
        return [path for path in paths if os.path.lexists(path)]

    def adopt(self, path: pathlib.Path, name: str) -> None:
        """Move a link's pin to this schema, in one step. Call it when the link runs our program.

        An existing link of the same name loses its pin.
        """
        os.rename(path, self.links / name)

    def discard_schema(self, schema: pathlib.Path) -> None:
        """Unpin all of one of `other_schemas`: programs, maps, and links not taken over."""
        _remove_tree(schema)

    def linked_ifindexes(self, program: str, schema: pathlib.Path | None = None) -> list[int]:
        """Interfaces for which a link of `program` is pinned, whether or not they still exist.

        schema: one of `other_schemas`; None: this one.
        """
        name = re.compile(rf"{program}-(\d+)({MOVING})?")
        try:
            entries = os.listdir((schema or self.schema) / "links")
        except FileNotFoundError:
            return []
        return sorted({int(match[1]) for entry in entries if (match := name.fullmatch(entry))})

    def remove_objects(self) -> int:
        """Unpin all objects of every schema; other entries of `root` stay. Returns the number of
        pins."""
        return sum(_remove_tree(path) for path in self.root.glob("v*"))

    def remove_everything(self) -> int:
        """Unpin all objects of every schema. Returns the number of pins.

        The kernel detaches a link when its last pin and descriptor are gone.
        """
        return _remove_tree(self.root)


def is_bpffs(path: str | os.PathLike[str]) -> bool:
    """Whether `path` exists and lies on a BPF file system (statfs(2))."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs has 120 bytes on 64-bit
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    magic = ctypes.c_long.from_buffer(buffer).value
    return magic & 0xFFFFFFFF == _BPF_FS_MAGIC


def _claim(root: pathlib.Path) -> None:
    """Make podgate's directory, which only root enters. Raises `PinError` and `OSError`.

    A BPF file system that was mounted without `mode=` has the mode 1777 (kernel/bpf/inode.c), so
    any user may have made that directory first, and could then exchange what is pinned there.
    An error would let that user keep podgate out, so it is moved aside: in a directory of this
    mode only root and its owner can do that.
    """
    if _is_own(root):
        if stat.S_IMODE(root.stat().st_mode) != 0o700:  # as previous versions made it
            root.chmod(0o700)
        return
    # A relay also imports this module, and claims nothing.
    import tempfile

    made = tempfile.mkdtemp(prefix=f"{root.name}-", dir=root.parent)
    for attempt in range(_CLAIM_ATTEMPTS):
        with contextlib.suppress(OSError):
            # Also in place of an empty directory.
            os.rename(made, root)
            return
        with contextlib.suppress(FileNotFoundError):
            os.rename(root, f"{made}-foreign{attempt}")
    os.rmdir(made)
    raise errors.PinError(
        f"{root} belongs to another user and is made again whenever it is moved aside; end that "
        f"user's processes, and run 'chmod 0700 {root.parent}'"
    )


def _is_own(root: pathlib.Path) -> bool:
    """Whether it is a directory of this process' user, and no link to one."""
    try:
        status = os.lstat(root)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _remove_tree(root: pathlib.Path) -> int:
    """Remove a directory with all pins below it. Returns the number of pins.

    The compile process of a killed agent may pin meanwhile, so what it adds is removed as well.
    """
    count = 0
    for attempt in range(_REMOVE_ATTEMPTS):
        if not os.path.lexists(root):
            break
        for directory, _, files in os.walk(root, topdown=False):
            for name in files:
                os.unlink(os.path.join(directory, name))
                count += 1
            try:
                os.rmdir(directory)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or attempt == _REMOVE_ATTEMPTS - 1:
                    raise
    return count


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """The descriptor of a pinned object, for the duration of the block. Raises `BpfError`."""
    fd = syscalls.open_pin(os.fspath(path))
    try:
        yield fd
    finally:
        os.close(fd)


def unlink_quietly(path: str | os.PathLike[str]) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
