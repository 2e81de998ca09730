"""Cgroups that rules name by path: which they are now."""

import dataclasses
import pathlib
import stat
from collections.abc import Iterable, Mapping


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
