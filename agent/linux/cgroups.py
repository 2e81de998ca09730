"""Cgroups: where version 2 is mounted, their ids by path and their paths by id."""

import contextlib
import dataclasses
import os
import pathlib
import stat
from collections.abc import Iterable, Mapping

_ROOT_INODE = 1


@dataclasses.dataclass(frozen=True, slots=True)
class CgroupId:
    """What the gate knows a cgroup by.

    id: the directory's inode number, never used again for another; level: directories below the
    root, None where podgate cannot know it, from within a cgroup namespace of its own.
    """

    id: int
    level: int | None


def resolve(root: pathlib.Path | None, paths: Iterable[str]) -> Mapping[str, CgroupId]:
    """Those of the paths that exist below `root`, where cgroup v2 is mounted. Some microseconds for
    each path.
    """
    if root is None:
        return {}
    # Not there in the real root (Documentation/admin-guide/cgroup-v2.rst, "cgroup.type").
    sees_the_root = not (root / "cgroup.type").exists()
    found = {}
    for path in paths:
        try:
            status = (root / path[1:]).stat()
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            level = len([part for part in path.split("/") if part])
            found[path] = CgroupId(status.st_ino, level if sees_the_root else None)
    return found


def cgroup2_mount(mounts: pathlib.Path = pathlib.Path("/proc/mounts")) -> pathlib.Path | None:
    """Where the root of cgroup v2 is mounted: on hybrid hosts it is not /sys/fs/cgroup itself, and
    a container may have a part of it, too."""
    for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, path, kind, *_ = line.split()
        mount = pathlib.Path(path.encode().decode("unicode_escape"))
        if kind == "cgroup2" and _is_root(mount):
            return mount
    return None


def _is_root(mount: pathlib.Path) -> bool:
    """By its inode, whatever cgroup namespaces hide: cgroup_setup_root in kernel/cgroup/cgroup.c
    warns of any other."""
    try:
        return mount.stat().st_ino == _ROOT_INODE
    except OSError:
        return False


def cgroup_paths(wanted: set[int]) -> dict[int, str]:
    """Paths of cgroups by id (their directory's inode number), as far as they still exist."""
    root = cgroup2_mount()
    if root is None:
        return {}
    found = {}
    for directory, _, _ in os.walk(root):
        with contextlib.suppress(OSError):
            inode = os.stat(directory).st_ino
            if inode in wanted:
                found[inode] = "/" + os.path.relpath(directory, root).removeprefix(".")
                if len(found) == len(wanted):
                    break
    return found
