"""Cgroups of sources: by path, of systemd's units by name, of hostNetwork pods by uid.

Where cgroups lie is a convention of those that make them; who may make them there decides whether
it can be trusted. So only what is directly in directories that root owns, and that systemd and the
kubelet use, counts: no user's session, no container, and no process chooses its own name.
"""

import os
import pathlib
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping

from agent.linux.cgroups import CgroupId, root_level
from agent.linux.inotify import DirectoryWatches
from agent.linux.pods_cgroup import PodsCgroup
from agent.linux.procfs import raise_own
from agent.policy.api_types import RuleSource

_UNITS = (".service", ".scope", ".slice")
# Of the kubelet, whose pods are not units; where it is not in the root of cgroup v2 it is below no
# slice of systemd's.
_PODS = ("kubepods", "kubepods.slice")
# The kubelet's names (pkg/kubelet/cm/helpers_linux.go, qos_container_manager_linux.go), by the
# drivers cgroupfs and systemd; the latter's begin with those of the slices above.
_CLASSES = ("burstable", "besteffort", "burstable.slice", "besteffort.slice")
# Further directories appear while directories are read, at most this often in one refresh.
_MAX_READS = 5


class SourceCgroups:
    """Finds the cgroups of sources, and watches where these appear and disappear."""

    def __init__(self, root: pathlib.Path | None, pods_cgroup: PodsCgroup | None = None) -> None:
        """root: the mount point of cgroup v2, None for none; pods_cgroup: what is known of it, by
        default that pods are in the usual places."""
        self._root = root
        self._pods_cgroup = pods_cgroup or PodsCgroup(root)
        self.watches: DirectoryWatches | None = None
        """Gets the directories to watch; None: `resolve` is called often enough without."""

    def resolve(
        self, sources: Collection[RuleSource], pods: Mapping[str, Collection[str]]
    ) -> Mapping[str, tuple[CgroupId, ...]]:
        """Those that exist, by `RuleSource.name`, in the order of their ids. Blocks: a stat of each
        path, and a listing of systemd's slices and the kubelet's directories if one is needed.

        pods: uids of the hostNetwork pods that each source of kind "pods" selects.
        """
        if self._root is None:
            return {}
        for _ in range(_MAX_READS):
            reading = _Reading(self._root, self._pods_cgroup)
            found = {
                source.name: cgroups
                for source in sources
                if (cgroups := reading.cgroups(source, pods.get(source.name, ())))
            }
            # What appeared before a directory was watched is found by reading once more.
            if not (self.watches and self.watches.watch_only(reading.directories)):
                break
        return found


class _Reading:
    """One pass over the cgroups' tree; `directories`: those that it depends on."""

    def __init__(self, root: pathlib.Path, pods_cgroup: PodsCgroup) -> None:
        self.directories: set[pathlib.Path] = set()
        self._root = root
        self._pods_cgroup = pods_cgroup
        self._root_level = root_level(root)
        self._units: dict[str, list[pathlib.Path]] | None = None
        self._pods: dict[str, list[pathlib.Path]] | None = None

    def cgroups(self, source: RuleSource, uids: Iterable[str]) -> tuple[CgroupId, ...]:
        match source.kind:
            case "unit":
                found = self._of_units().get(source.name, [])
            case "pods":
                of_pods = self._of_pods()
                found = [path for uid in uids for path in of_pods.get(uid, [])]
            case _:
                path = self._root / source.name[1:]
                self._depend_on(path)
                found = [path]
        made = [cgroup for path in found if (cgroup := self._cgroup(path))]
        return tuple(sorted(made, key=lambda cgroup: cgroup.id))

    def _cgroup(self, path: pathlib.Path) -> CgroupId | None:
        try:
            status = path.stat()
        except OSError as error:
            raise_own(error)
            return None
        if not stat.S_ISDIR(status.st_mode):
            return None
        if self._root_level is None:
            return CgroupId(status.st_ino, None)
        level = self._root_level + len(path.relative_to(self._root).parts)
        return CgroupId(status.st_ino, level)

    def _depend_on(self, path: pathlib.Path) -> None:
        """Watch the nearest directory above that exists."""
        if path == self._root:
            return
        for directory in path.parents:
            if directory in self.directories or directory == self._root or directory.is_dir():
                self.directories.add(directory)
                return

    def _of_units(self) -> dict[str, list[pathlib.Path]]:
        if self._units is None:
            self._units = {}
            for path in self._in_slices(self._root):
                if path.name.endswith(_UNITS):
                    self._units.setdefault(path.name, []).append(path)
        return self._units

    def _in_slices(self, directory: pathlib.Path) -> Iterator[pathlib.Path]:
        """All cgroups directly in systemd's slices; those of pods are the kubelet's."""
        for path in self._list(directory):
            yield path
            if path.suffix == ".slice" and path.name not in _PODS:
                yield from self._in_slices(path)

    def _of_pods(self) -> dict[str, list[pathlib.Path]]:
        """The cgroups of pods by uid."""
        if self._pods is None:
            self._pods = {}
            if self._pods_cgroup.confirmed is None:
                # It may appear in any of the usual places.
                for path in (self._root, *self._list(self._root)):
                    self.directories.add(path)
            for path in self._pods_cgroup.directories():
                self._depend_on(path)
                self._read_pods(path)
        return self._pods

    def _read_pods(self, directory: pathlib.Path) -> None:
        assert self._pods is not None
        for path in self._list(directory):
            if _is_named(path, directory, _CLASSES):
                self._read_pods(path)
            else:
                name = path.name.removesuffix(".slice")
                uid = name.rpartition("pod")[2].replace("_", "-")
                self._pods.setdefault(uid, []).append(path)

    def _list(self, directory: pathlib.Path) -> list[pathlib.Path]:
        """The cgroups in a directory; none if others than root may make them."""
        self.directories.add(directory)
        try:
            if directory.stat().st_uid != 0:
                return []
            with os.scandir(directory) as entries:
                return [
                    pathlib.Path(entry.path)
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False)
                ]
        except OSError as error:
            raise_own(error)
            # Gone meanwhile: the directory above reports that.
            return []


def _is_named(path: pathlib.Path, parent: pathlib.Path, names: Collection[str]) -> bool:
    """Whether it has one of these names, alone or after its slice's."""
    prefix = f"{parent.name.removesuffix('.slice')}-"
    return path.name.removeprefix(prefix) in names
