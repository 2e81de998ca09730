"""The cgroup above all pods', which the kubelet makes below its --cgroup-root, at any depth.

A process of a known pod shows it. Until one does, the kubelet's names count where they usually are:
at the root of cgroup v2, and in a directory there.
"""

import os
import pathlib
import re
import stat
from collections.abc import Collection, Iterator

from agent.linux.cgroups import root_level
from agent.linux.procfs import Procfs, raise_own

# With the drivers cgroupfs and systemd; the latter's begin with those of the slices above
# (kubernetes/pkg/kubelet/cm/cgroup_manager_linux.go).
_NAME = re.compile(r"(?:.*-)?kubepods(?:\.slice)?", re.DOTALL)
_POD_NAME = re.compile(r"(?:.*-)?pod([-_0-9a-f]{32,36})(?:\.slice)?", re.DOTALL)
_NAMES = ("kubepods.slice", "kubepods")
MISSING = (
    "The cgroup of pods is not found below cgroup v2: neither by a process of a pod, nor where the "
    "kubelet usually makes it. So processes of pods count as the host's."
)

# A read takes some 15 us, so a search at most 0.1 s of a thread.
_MAX_PROCESSES = 8192


class PodsCgroup:
    """Finds it. `search` may run in a thread of its own; all else reads what is found."""

    def __init__(self, root: pathlib.Path | None, procfs: Procfs | None = None) -> None:
        """root: the mount point of cgroup v2, None for none."""
        self._root = root
        self._procfs = procfs or Procfs()
        self._current: tuple[pathlib.Path, int] | None = None
        """Its directory, and the directory's inode."""
        self._confirmed: pathlib.Path | None = None

    @property
    def confirmed(self) -> pathlib.Path | None:
        """Its directory, where a process of a pod has shown it and it still exists."""
        path = self._confirmed
        return path if path is not None and _inode(path) is not None else None

    def directories(self) -> list[pathlib.Path]:
        """Where pods may be: what is confirmed, otherwise each of the usual places."""
        path = self.confirmed
        return [path] if path is not None else list(self._usual())

    def identity(self) -> tuple[int, int] | None:
        """Its id, and its depth below the root of all. None on a node without a kubelet's cgroups,
        or in a cgroup namespace whose depth is not known."""
        if self._root is None:
            return None
        path = self.confirmed or (self._current[0] if self._current else None)
        inode = _inode(path) if path is not None else None
        if path is None or inode is None:
            path = next(self._usual(), None)
            inode = _inode(path) if path is not None else None
        if path is None or inode is None:
            self._current = None
            return None
        self._current = path, inode
        level = root_level(self._root)
        return None if level is None else (inode, level + len(path.relative_to(self._root).parts))

    def search(self, uids: Collection[str]) -> bool:
        """Find it by a process of one of these pods; whether it is another one than before.

        Blocks. Raises `OSError` if this process has no descriptor or memory left.
        """
        if self._root is None:
            return False
        for count, pid in enumerate(self._procfs.pids()):
            if count == _MAX_PROCESSES:
                break
            path = self._procfs.cgroup(pid)
            found = above_pods(path, uids) if path else None
            if found is None:
                continue
            directory = self._root.joinpath(*found)
            if self._is_roots(directory):
                is_new = directory != self.confirmed
                self._confirmed = directory
                return is_new
        return False

    def _usual(self) -> Iterator[pathlib.Path]:
        """Once a second while none is found: a stat each, without a listing of each directory."""
        assert self._root is not None
        try:
            with os.scandir(self._root) as entries:
                above = sorted(one.path for one in entries if one.is_dir(follow_symlinks=False))
        except OSError as error:
            raise_own(error)
            return
        places = [f"{self._root}/{name}" for name in _NAMES]
        for path in above:
            of_slice = f"{os.path.basename(path).removesuffix('.slice')}-{_NAMES[0]}"
            places += (f"{path}/{of_slice}", f"{path}/{_NAMES[1]}")
        for place in places:
            if os.path.lexists(place) and self._is_roots(pathlib.Path(place)):
                yield pathlib.Path(place)

    def _is_roots(self, path: pathlib.Path) -> bool:
        """Whether root alone can make cgroups on the way to it: no process chooses its own name."""
        assert self._root is not None
        try:
            return all(
                stat.S_ISDIR(status.st_mode) and status.st_uid == 0
                for each in (path, *path.parents)
                if each.is_relative_to(self._root)
                for status in (os.lstat(each),)
            )
        except OSError as error:
            raise_own(error)
            return False


def above_pods(path: str, uids: Collection[str]) -> tuple[str, ...] | None:
    """Names on the way to the cgroup above pods, by the cgroup of a process of one of them.

    The pod nearest to the root counts: a container can make cgroups below its own.
    """
    parts = tuple(part for part in path.split("/") if part)
    for index, part in enumerate(parts):
        found = _POD_NAME.fullmatch(part)
        if found and found[1].replace("_", "-") in uids:
            for above in range(index, 0, -1):
                if _NAME.fullmatch(parts[above - 1]) and not _POD_NAME.fullmatch(parts[above - 1]):
                    return parts[:above]
            return None
    return None


def _inode(path: pathlib.Path) -> int | None:
    """Of a directory that exists."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino if stat.S_ISDIR(status.st_mode) else None
