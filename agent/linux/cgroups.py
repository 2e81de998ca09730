"""cgroup v2: its mount, ids of cgroups by path, and paths by id."""

import contextlib
import dataclasses
import os
import pathlib
import re

from agent.linux.procfs import Procfs, raise_own

_ROOT_INODE = 1
# Spaces, tabs, line breaks and backslashes in /proc/mounts (the kernel's fs/proc_namespace.c);
# all other bytes are as they are.
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")


@dataclasses.dataclass(frozen=True, slots=True)
class CgroupId:
    """Identity of a cgroup for the gate.

    id: the directory's inode number, which is never reused; level: directories below the root, None
    if podgate is in a cgroup namespace and cannot see the root.
    """

    id: int
    level: int | None


def ancestors(root: pathlib.Path, path: str) -> list[int]:
    """Ids of a cgroup and those above it, the root first; empty if it was removed."""
    found = existing(root, path)
    return found if len(found) == len(_parts(path)) + 1 else []


def existing(root: pathlib.Path, path: str) -> list[int]:
    """Ids of those that exist of a cgroup and those above it, the root first."""
    parts = _parts(path)
    found: list[int] = []
    with contextlib.suppress(OSError):
        found.extend(root.joinpath(*parts[:level]).stat().st_ino for level in range(len(parts) + 1))
    return found


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def own_cgroup() -> int | None:
    """Id of this process's cgroup; None if cgroup v2 is not mounted, or in a cgroup namespace."""
    root, path = cgroup2_mount(), Procfs().cgroup("self")
    if root is None or path is None or not sees_the_root(root):
        return None
    found = ancestors(root, path)
    return found[-1] if found else None


def cgroup2_mount(mounts: pathlib.Path = pathlib.Path("/proc/mounts")) -> pathlib.Path | None:
    """Mount point of cgroup v2's root. On hybrid hosts it is not /sys/fs/cgroup itself, and a
    container may have a part of it mounted, too."""
    for line in mounts.read_bytes().split(b"\n"):
        fields = line.split(b" ")
        if len(fields) > 2 and fields[2] == b"cgroup2":
            mount = pathlib.Path(os.fsdecode(_ESCAPE.sub(_unescaped, fields[1])))
            if _is_root(mount):
                return mount
    return None


def _unescaped(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8)])


def sees_the_root(root: pathlib.Path) -> bool:
    """Whether the mount's root is the real one, which has no such file
    (Documentation/admin-guide/cgroup-v2.rst, "cgroup.type")."""
    return not (root / "cgroup.type").exists()


def _is_root(mount: pathlib.Path) -> bool:
    """By its inode, which cgroup namespaces do not hide: cgroup_setup_root in
    kernel/cgroup/cgroup.c warns about any other."""
    try:
        return mount.stat().st_ino == _ROOT_INODE
    except OSError:
        return False


def cgroup_paths(ids: set[int]) -> dict[int, str]:
    """Paths of cgroups by id (their directory's inode number), of those that still exist; for
    people: bytes that are not UTF-8 are escaped."""
    root = cgroup2_mount()
    if root is None or not ids:
        return {}
    found = {}
    for directory, _, _ in os.walk(root, onerror=raise_own):
        with contextlib.suppress(OSError):
            inode = os.stat(directory).st_ino
            if inode in ids:
                path = "/" + os.path.relpath(directory, root).removeprefix(".")
                found[inode] = os.fsencode(path).decode(errors="backslashreplace")
                if len(found) == len(ids):
                    break
    return found
