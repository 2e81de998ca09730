"""cgroup v2: its mount, ids of cgroups by path, and paths by id."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import re

from agent.linux.procfs import Procfs, raise_own
from bpf import cgroup_levels

_ROOT_INODE = 1
# Spaces, tabs, line breaks and backslashes in mountinfo (the kernel's fs/proc_namespace.c);
# all other bytes are as they are.
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")


@dataclasses.dataclass(frozen=True, slots=True)
class CgroupId:
    """Identity of a cgroup for the gate.

    id: the directory's inode number, which is never reused; level: directories below the root of
    all, None if podgate is in a cgroup namespace and does not know how deep that is.
    """

    id: int
    level: int | None


def ancestors(root: pathlib.Path, path: str) -> list[int]:
    """Ids of a cgroup and those above it, the root of all first: 0 for what a cgroup namespace
    hides. Empty if it was removed. root: the mount of cgroup v2."""
    found = _ids(root, path)
    return _with_hidden(root, found) if len(found) == len(_parts(path)) + 1 else []


def existing(root: pathlib.Path, path: str) -> list[int]:
    """As `ancestors`, of those that exist."""
    return _with_hidden(root, _ids(root, path))


def _with_hidden(root: pathlib.Path, ids: list[int]) -> list[int]:
    return [0] * (root_level(root) or 0) + ids


def _ids(root: pathlib.Path, path: str) -> list[int]:
    parts = _parts(path)
    found: list[int] = []
    with contextlib.suppress(OSError):
        found.extend(root.joinpath(*parts[:level]).stat().st_ino for level in range(len(parts) + 1))
    return found


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def own_cgroup() -> int | None:
    """Id of this process's cgroup; None if cgroup v2 is not mounted."""
    root, path = cgroup2_mount(), Procfs().cgroup("self")
    if root is None or path is None:
        return None
    found = ancestors(root, path)
    return found[-1] if found else None


def cgroup2_mount(
    mounts: pathlib.Path = pathlib.Path("/proc/self/mountinfo"),
) -> pathlib.Path | None:
    """Mount point of cgroup v2's root. On hybrid hosts it is not /sys/fs/cgroup itself, and a
    container may have a part of it mounted, too. On a node that is a container (kind, k3d, LXC) it
    is the root of the node's cgroup namespace.
    """
    of_namespace: pathlib.Path | None = None
    for line in mounts.read_bytes().split(b"\n"):
        # proc_pid_mountinfo(5): optional fields end with a dash.
        before, _, after = line.partition(b" - ")
        fields = before.split(b" ")
        if len(fields) < 5 or after.split(b" ")[0] != b"cgroup2":
            continue
        root, mount = fields[3], _path(fields[4])
        if _is_root(mount):
            return mount
        if root == b"/" and of_namespace is None and mount.is_dir():
            of_namespace = mount
    return of_namespace if of_namespace is not None and _has_all_of_the_node() else None


def _has_all_of_the_node() -> bool:
    """Whether this process's cgroup namespace has the node's first process. A container on the node
    may have a namespace of its own, with a root that is the container's (cgroup_namespaces(7))."""
    path = Procfs().cgroup(1)
    return path is not None and not path.startswith("/..")


def _path(escaped: bytes) -> pathlib.Path:
    return pathlib.Path(os.fsdecode(_ESCAPE.sub(_unescaped, escaped)))


def _unescaped(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8)])


def root_level(root: pathlib.Path) -> int | None:
    """How deep a mount's root is below the root of all; None if that is not known."""
    # The root of all has no such file (Documentation/admin-guide/cgroup-v2.rst, "cgroup.type").
    try:
        if not (root / "cgroup.type").exists():
            return 0
        return _level(root.stat().st_ino)
    except OSError:
        return None


@functools.cache
def _level(cgroup_id: int) -> int | None:
    return cgroup_levels.of_ancestor(cgroup_id)


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
