"""nftables expressions for the sockets of a cgroup's processes."""

import os
import pathlib

from agent.errors import PodgateError
from agent.linux.pods_cgroup import PodsCgroup

# nft accepts cgroups as paths below this directory, wherever cgroup v2 is mounted, and passes the
# directory's inode to the kernel: a cgroup that is created again under the same name is another.
_NFT_CGROUPS = pathlib.PurePath("/sys/fs/cgroup")


class SocketMatchError(PodgateError):
    """This cgroup cannot be matched; the text is one sentence."""


class CgroupGoneError(SocketMatchError):
    """The cgroup does not exist, or no longer."""


class CgroupMatches:
    """Builds expressions for cgroups below one mount of cgroup v2.

    They match sockets that were created in the cgroup or below it. The kernel counts levels from
    the root of the calling process's cgroup namespace (since Linux 6.11; before, from the real
    root), so paths are relative to it; paths that leave it are rejected.
    """

    def __init__(self, mount: pathlib.PurePath, pods_cgroup: PodsCgroup | None = None) -> None:
        """pods_cgroup: what is known of it; by default the usual places count."""
        self._mount = pathlib.Path(mount)
        self._pods_cgroup = pods_cgroup or PodsCgroup(self._mount)

    def of(self, path: str) -> str:
        """path: as /proc/PID/cgroup shows it, "/a/b". Raises `SocketMatchError` or
        `CgroupGoneError`."""
        parts = [part for part in path.split("/") if part]
        if not parts or ".." in parts:
            raise SocketMatchError(f"cgroup {path!r} cannot be matched")
        if not self.exists(path):
            raise CgroupGoneError(f"cgroup {path!r} does not exist below {self._mount}")
        return self._match(self._mount.joinpath(*parts), len(parts))

    def of_pods(self) -> tuple[str, ...]:
        """For the cgroups above pods that exist now."""
        found = sorted(self._pods_cgroup.directories())
        return tuple(self._match(path, len(path.relative_to(self._mount).parts)) for path in found)

    def match_none(self) -> str:
        """A valid expression that never matches: the root has level 0."""
        return self._match(self._mount, 1)

    def exists(self, path: str) -> bool:
        return (self._mount / path.lstrip("/")).is_dir()

    @staticmethod
    def _match(directory: pathlib.Path, level: int) -> str:
        path = os.path.relpath(directory, _NFT_CGROUPS)
        if '"' in path or not path.isprintable():
            raise SocketMatchError(f"nft accepts no cgroup with a name like {str(directory)!r}")
        return f'socket cgroupv2 level {level} "{path}"'
