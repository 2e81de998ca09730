"""Finding the kubelet's cgroup: which process it is, and whether its cgroup tells it from pods.

The gate admits by the cgroup of a socket's creator, so whatever may create sockets in that cgroup
counts as the kubelet. Found by name, it must be root's, in the node's network namespace and in no
pod's cgroup: anybody can take a name, and a pod's process one that is convenient.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator

from agent.linux.procfs import Procfs
from agent.settings import KUBELET_NAME, ByProcess, KubeletSetting

_KUBELET_PORT = 10250  # --port's default, kubernetes/pkg/cluster/ports

# What the kubelet's cgroup managers and container runtimes call what they make, systemd's way and
# cgroupfs' (kubernetes/pkg/kubelet/cm/cgroup_manager_linux.go); kind's is kubelet-kubepods.slice.
_PODS = re.compile(
    r"(.*-)?kubepods(-.*)?(\.slice)?"
    r"|(.*-)?pod[0-9a-f]{8}[-_0-9a-f]{24,}(\.slice)?"
    r"|(cri-containerd|crio|docker|libpod)[-:].*"
)
# No kubelet has so many cgroups of its own; whoever has, has containers'.
_MOST_CGROUPS = 500


@dataclasses.dataclass(frozen=True, slots=True)
class KubeletCgroup:
    """The cgroup that is the kubelet. A new process in the same one is no other."""

    path: str
    """As /proc/PID/cgroup shows it, from where cgroup v2 is mounted: "/a/b"."""
    id: int
    """What `bpf_skb_cgroup_id` returns: the directory's inode."""
    is_shared: bool
    """Others than the kubelet are in it, such as k3s' API server: they cannot be told apart."""
    pid: int | None = dataclasses.field(compare=False)
    """None only when a cgroup that was named has no process yet."""
    started: int | None = dataclasses.field(compare=False, default=None)
    """When the process started, in ticks since boot."""


class KubeletCgroupError(Exception):
    """The kubelet is there, but its cgroup must not be admitted; the message is one sentence."""


def find(
    setting: KubeletSetting,
    *,
    procfs: Procfs,
    cgroup2: pathlib.Path,
    keep: KubeletCgroup | None = None,
) -> KubeletCgroup | None:
    """The kubelet's cgroup, or None while there is no kubelet. Reads /proc: milliseconds.

    keep: the one found last, which stays the kubelet while it lives, whoever takes its name since.
    Raises `KubeletCgroupError`.
    """
    if isinstance(setting, ByProcess):
        pid = _choose(list(_candidates(setting, procfs)), procfs, keep)
        path = None if pid is None else procfs.cgroup(pid)
        if path is None:
            return None
    else:
        path = setting.path
        pid = _oldest(_members(cgroup2 / path[1:]), procfs)
    if path == "/":
        raise KubeletCgroupError(
            f"the kubelet (pid {pid}) is in the root cgroup, as is every process that is put in "
            "none; run it as a systemd unit, or put it into a cgroup of its own."
        )
    if ".." in path.split("/"):
        raise KubeletCgroupError(
            f"the kubelet (pid {pid}) is in a cgroup that podgate cannot see from its own cgroup "
            "namespace; run podgate in the host's (privileged pods are)."
        )
    directory = cgroup2 / path[1:]
    try:
        number = directory.stat().st_ino
    except FileNotFoundError:
        if pid is None or procfs.started(pid) is None:
            return None
        raise KubeletCgroupError(
            f"the kubelet's cgroup {path} is not below {cgroup2}; mount the node's cgroup v2 there."
        ) from None
    _reject_pods_cgroup(path, directory, pid, procfs)
    is_shared = _is_shared(setting, directory, pid, procfs)
    return KubeletCgroup(path, number, is_shared, pid, procfs.started(pid) if pid else None)


def _candidates(setting: ByProcess, procfs: Procfs) -> Iterator[int]:
    own = procfs.namespace("self", "net")
    for pid in procfs.pids():
        if (
            procfs.is_named(pid, setting.name)
            and procfs.started(pid) is not None
            and procfs.effective_uid(pid) == 0
            and procfs.namespace(pid, "net") == own
            and not _is_pods(procfs.cgroup(pid) or "")
            and (setting.port is None or procfs.is_listening(pid, setting.port))
        ):
            yield pid


def _choose(pids: list[int], procfs: Procfs, keep: KubeletCgroup | None) -> int | None:
    if keep is not None and keep.pid in pids and procfs.started(keep.pid) == keep.started:
        return keep.pid
    if len({procfs.cgroup(pid) for pid in pids}) > 1:
        listening = [pid for pid in pids if procfs.is_listening(pid, _KUBELET_PORT)]
        if len({procfs.cgroup(pid) for pid in listening}) != 1:
            numbers = ", ".join(map(str, sorted(pids)))
            raise KubeletCgroupError(
                f"several processes could be the kubelet (pids {numbers}), in different cgroups; "
                "say which by its port or its cgroup."
            )
        pids = listening
    return _oldest(pids, procfs)


def _oldest(pids: list[int], procfs: Procfs) -> int | None:
    """Of a process and what it started, the first; children carry its name until they exec."""
    ages = [(started, pid) for pid in pids if (started := procfs.started(pid)) is not None]
    return min(ages)[1] if ages else None


def _reject_pods_cgroup(
    path: str, directory: pathlib.Path, pid: int | None, procfs: Procfs
) -> None:
    """Raises `KubeletCgroupError` if a pod's process could count as the kubelet."""
    if _is_pods(path):
        raise KubeletCgroupError(
            f"cgroup {path} is a pod's, or holds pods; it cannot stand for the kubelet."
        )
    like: int | str = "self" if pid is None else pid
    home = [procfs.namespace(like, kind) for kind in ("net", "pid")]
    for count, (below, names, _) in enumerate(os.walk(directory)):
        pods = [name for name in names if _PODS.fullmatch(name)]
        if pods or count > _MOST_CGROUPS:
            what = pods[0] if pods else f"more than {_MOST_CGROUPS} cgroups"
            raise KubeletCgroupError(
                f"the kubelet's cgroup {path} holds pods ({what}), and cannot be told from them; "
                "run the kubelet in a cgroup of its own."
            )
        for member in _members(pathlib.Path(below)):
            spaces = [procfs.namespace(member, kind) for kind in ("net", "pid")]
            if None not in spaces and spaces != home:
                raise KubeletCgroupError(
                    f"the kubelet's cgroup {path} holds process {member} of another namespace, a "
                    "container's; run the kubelet in a cgroup of its own."
                )


def _is_shared(
    setting: KubeletSetting, directory: pathlib.Path, pid: int | None, procfs: Procfs
) -> bool:
    """Whether processes that the kubelet did not start are in its cgroup, or it is itself more
    than the kubelet: one that is known by another name (k3s) is."""
    if isinstance(setting, ByProcess) and setting.name != KUBELET_NAME:
        return True
    return pid is not None and any(
        not _descends(member, pid, procfs) for member in _members(directory)
    )


def _descends(pid: int, ancestor: int, procfs: Procfs) -> bool:
    """Whether it is, or was started by, the other; also when it has just ended."""
    current: int | None = pid
    while current != ancestor:
        if current is None:
            return True
        if current <= 1:
            return False
        current = procfs.parent(current)
    return True


def _members(directory: pathlib.Path) -> list[int]:
    """Processes in exactly this cgroup; none when it is gone, or of a kind that has none."""
    with contextlib.suppress(OSError):
        return [int(line) for line in (directory / "cgroup.procs").read_text().split()]
    return []


def _is_pods(path: str) -> bool:
    return any(_PODS.fullmatch(part) for part in path.split("/"))
