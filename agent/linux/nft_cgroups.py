"""nftables expressions for the sockets of a cgroup's processes."""

import os
import pathlib

# nft takes cgroups as paths below this directory, wherever cgroup v2 is mounted, and gives the
# kernel the directory's inode: a cgroup that is made anew under the same name is another.
_NFT_CGROUPS = pathlib.PurePath("/sys/fs/cgroup")

# The kubelet's own names, by either cgroup driver, and below --cgroup-root as kind has it.
_PODS = ("kubepods", "kubepods.slice", "*/kubepods", "*/*-kubepods.slice")


class NoMatch(Exception):
    """Nobody can be told from others by this cgroup; the message is one sentence."""


class CgroupGone(NoMatch):
    """There is no such cgroup, or none any more."""


class SocketMatches:
    """Makes expressions for cgroups below one mount of cgroup v2.

    They match sockets that were made in the cgroup or below it. The kernel compares levels from the
    root of the caller's cgroup namespace (since Linux 6.11; before, from the real root), so paths
    must be seen from there: what leads out of it is refused.
    """

    def __init__(self, mount: pathlib.PurePath) -> None:
        self._mount = pathlib.Path(mount)

    def of(self, path: str) -> str:
        """path: as /proc/PID/cgroup shows it, "/a/b". Raises `NoMatch` or `CgroupGone`."""
        parts = [part for part in path.split("/") if part]
        if not parts or ".." in parts:
            raise NoMatch(f"nobody can be told from others by cgroup {path!r}")
        if not self.exists(path):
            raise CgroupGone(f"there is no cgroup {path!r} below {self._mount}")
        return self._match(self._mount.joinpath(*parts), len(parts))

    def of_pods(self) -> tuple[str, ...]:
        """For the cgroups that kubelets put pods into; only those that there are now."""
        found = sorted(path for pattern in _PODS for path in self._mount.glob(pattern))
        return tuple(self._match(path, len(path.relative_to(self._mount).parts)) for path in found)

    def of_nobody(self) -> str:
        """A valid one that never matches: the root is at level 0."""
        return self._match(self._mount, 1)

    def exists(self, path: str) -> bool:
        return (self._mount / path.lstrip("/")).is_dir()

    @staticmethod
    def _match(directory: pathlib.Path, level: int) -> str:
        path = os.path.relpath(directory, _NFT_CGROUPS)
        if '"' in path or not path.isprintable():
            raise NoMatch(f"nft takes no cgroup with a name like {str(directory)!r}")
        return f'socket cgroupv2 level {level} "{path}"'
