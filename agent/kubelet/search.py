"""Search for the kubelet's cgroup: finds its process, and rejects cgroups shared with pods.

The gate admits by the cgroup of a socket's creator, so any process that can create sockets in that
cgroup counts as the kubelet. Any process can take the kubelet's name, also one of a pod, so a
candidate must hold CAP_SYS_ADMIN in the initial user namespace: podgate cannot block such a process
anyway. It must be in the node's network namespace and in no container's cgroup, and the one
that serves the kubelet's port comes before all others.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator

from agent.errors import PodgateError
from agent.linux.procfs import Procfs, raise_own
from agent.settings import KUBELET_NAME, ByProcess, KubeletSetting

_KUBELET_PORT = 10250  # --port's default, kubernetes/pkg/cluster/ports

_IN_ONE_PROCESS = ("k3s-server", "k3s-agent", "k3s", "kubelite", "microshift")
"""Processes of which the kubelet is a part: of k3s (and k3d), MicroK8s and MicroShift. They count
where no process is the kubelet alone, and only while they serve its port: k3s has others of these
names."""

_CAP_SYS_ADMIN = 21  # linux/capability.h

# Names of the cgroups that the kubelet and container runtimes create, by systemd's and cgroupfs'
# drivers (kubernetes/pkg/kubelet/cm/cgroup_manager_linux.go); kind's is kubelet-kubepods.slice.
_PODS = re.compile(
    r"(.*-)?kubepods(-.*)?(\.slice)?"
    r"|(.*-)?pod[0-9a-f]{8}[-_0-9a-f]{24,}(\.slice)?"
    r"|(cri-containerd|crio|docker|libpod)[-:].*"
)
# And those of single containers: the id alone (cgroupfs' driver) or with its runtime's name, LXC,
# systemd-nspawn; and the directories in which runtimes put them.
_CONTAINERS = re.compile(
    r"([a-z]+[-_:])*[0-9a-f]{64}(\.scope)?"
    r"|lxc(\.(payload|monitor))?(\..*)?"
    r"|machine\.slice|machine-.*\.scope|systemd-nspawn@.*"
    r"|docker|k8s\.io|libpod_parent|buildkit|kata_.*"
)
# No kubelet has this many cgroups of its own; a cgroup that has them holds containers.
_MAX_CGROUPS = 500


@dataclasses.dataclass(frozen=True, slots=True)
class KubeletCgroup:
    """The kubelet's cgroup. It stays the same for a new process in it."""

    path: str
    """As in /proc/PID/cgroup, relative to the mount point of cgroup v2: "/a/b"."""
    id: int
    """The value of `bpf_skb_cgroup_id`: the directory's inode."""
    is_shared: bool
    """Whether it has processes other than the kubelet, such as k3s' API server."""
    pid: int | None = dataclasses.field(compare=False)
    """None only for a named cgroup without a process."""
    started: int | None = dataclasses.field(compare=False, default=None)
    """When the process started, in ticks since boot."""


class KubeletCgroupError(PodgateError):
    """The kubelet exists, but its cgroup must not be admitted; the message is one sentence."""


class AmbiguousKubeletError(KubeletCgroupError):
    """Several processes could be the kubelet, with equal evidence; none of them is admitted."""


def find(
    setting: KubeletSetting,
    *,
    procfs: Procfs,
    cgroup2: pathlib.Path,
    current: KubeletCgroup | None = None,
    scans: bool = True,
) -> KubeletCgroup | None:
    """The kubelet's cgroup; None while there is no kubelet. Reads /proc: milliseconds.

    current: the previous result. Its process stays the kubelet while it runs, unless another
    candidate serves the kubelet's port and it does not. scans: whether to look for others while it
    runs. Raises `KubeletCgroupError`.
    """
    if isinstance(setting, ByProcess):
        if current and not scans and _runs(current, procfs):
            pid = current.pid
        else:
            setting, pids = _named(setting, procfs)
            pid = _choose(pids, procfs, current)
        path = None if pid is None else procfs.cgroup(pid)
        if path is None:
            return None
    else:
        path = setting.path
        pid = _oldest(_members(cgroup2 / path[1:]), procfs)
        _reject_pods_path(path)
    if path == "/":
        raise KubeletCgroupError(
            f"the kubelet (pid {pid}) is in the root cgroup, the default of all processes; run it "
            "as a systemd unit, or move it to a cgroup of its own."
        )
    if not path.isprintable():
        # Neither nft nor a report could name it, and no kubelet has such a unit.
        raise KubeletCgroupError(
            f"the kubelet (pid {pid}) is in a cgroup whose name is not printable; run it as a "
            "systemd unit."
        )
    if ".." in path.split("/"):
        raise KubeletCgroupError(
            f"the kubelet (pid {pid}) is in a cgroup outside of podgate's cgroup namespace; run "
            "podgate in the host's (as privileged pods do)."
        )
    directory = cgroup2 / path[1:]
    try:
        number = directory.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        if pid is None or procfs.started(pid) is None:
            return None
        raise KubeletCgroupError(
            f"the kubelet's cgroup {path} is not below {cgroup2}; mount the node's cgroup v2 there."
        ) from None
    _reject_pods_cgroup(path, directory, pid, procfs)
    is_shared = _is_shared(setting, directory, pid, procfs)
    return KubeletCgroup(path, number, is_shared, pid, procfs.started(pid) if pid else None)


def _runs(current: KubeletCgroup, procfs: Procfs) -> bool:
    return current.pid is not None and procfs.started(current.pid) == current.started


def _named(setting: ByProcess, procfs: Procfs) -> tuple[ByProcess, list[int]]:
    """The candidates, and the setting that they fit."""
    found = list(_candidates(setting, procfs))
    if found or setting != ByProcess():
        return setting, found
    for name in _IN_ONE_PROCESS:
        other = ByProcess(name, _KUBELET_PORT)
        if found := list(_candidates(other, procfs)):
            return other, found
    return setting, []


def _candidates(setting: ByProcess, procfs: Procfs) -> Iterator[int]:
    own = procfs.namespace("self", "net")
    for pid in procfs.pids():
        if (
            procfs.is_named(pid, setting.name)
            and procfs.started(pid) is not None
            and procfs.has_capability(pid, _CAP_SYS_ADMIN)
            and procfs.namespace(pid, "net") == own
            and not any(map(is_containers, procfs.cgroups(pid).values()))
            and (setting.port is None or procfs.is_listening(pid, setting.port))
        ):
            yield pid


def _choose(pids: list[int], procfs: Procfs, current: KubeletCgroup | None) -> int | None:
    if len({procfs.cgroup(pid) for pid in pids}) > 1:
        serving = [pid for pid in pids if procfs.is_listening(pid, _KUBELET_PORT)]
        # A kubelet that has just started does not serve yet.
        pids = serving or pids
    if current and current.pid in pids and _runs(current, procfs):
        return current.pid
    if len({procfs.cgroup(pid) for pid in pids}) > 1:
        numbers = ", ".join(map(str, sorted(pids)))
        raise AmbiguousKubeletError(
            f"several processes could be the kubelet (pids {numbers}), in different cgroups; "
            "set --kubelet to its port or its cgroup."
        )
    return _oldest(pids, procfs)


def _oldest(pids: list[int], procfs: Procfs) -> int | None:
    """The oldest process: its children have its name until they exec."""
    ages = [(started, pid) for pid in pids if (started := procfs.started(pid)) is not None]
    return min(ages)[1] if ages else None


def _reject_pods_path(path: str) -> None:
    if _is_pods(path):
        raise KubeletCgroupError(
            f"cgroup {path} is a pod's, or holds pods; it cannot be admitted as the kubelet."
        )


def _reject_pods_cgroup(
    path: str, directory: pathlib.Path, pid: int | None, procfs: Procfs
) -> None:
    """Raises `KubeletCgroupError` if a pod's process could count as the kubelet."""
    _reject_pods_path(path)
    process: int | str = "self" if pid is None else pid
    own = [procfs.namespace(process, kind) for kind in ("net", "pid")]
    for count, (below, names, _) in enumerate(os.walk(directory, onerror=raise_own)):
        pods = [name for name in names if _PODS.fullmatch(name)]
        if pods or count > _MAX_CGROUPS:
            what = (
                os.fsencode(pods[0]).decode(errors="backslashreplace")
                if pods
                else f"more than {_MAX_CGROUPS} cgroups"
            )
            raise KubeletCgroupError(
                f"the kubelet's cgroup {path} also holds pods ({what}); run the kubelet in a "
                "cgroup of its own."
            )
        for member in _members(pathlib.Path(below)):
            spaces = [procfs.namespace(member, kind) for kind in ("net", "pid")]
            if None not in spaces and spaces != own:
                raise KubeletCgroupError(
                    f"the kubelet's cgroup {path} holds process {member} of a container's "
                    "namespace; run the kubelet in a cgroup of its own."
                )


def _is_shared(
    setting: KubeletSetting, directory: pathlib.Path, pid: int | None, procfs: Procfs
) -> bool:
    """Whether the cgroup has processes that the kubelet did not start, or the process is more than
    the kubelet, as those with another name (k3s) are."""
    if isinstance(setting, ByProcess) and setting.name != KUBELET_NAME:
        return True
    return pid is not None and any(
        not _descends(member, pid, procfs) for member in _members(directory)
    )


def _descends(pid: int, ancestor: int, procfs: Procfs) -> bool:
    """Whether a process is the ancestor or its descendant; also if it has just exited."""
    current: int | None = pid
    while current != ancestor:
        if current is None:
            return True
        if current <= 1:
            return False
        current = procfs.parent(current)
    return True


def _members(directory: pathlib.Path) -> list[int]:
    """Processes in exactly this cgroup; none if it is removed, or of a type without processes."""
    try:
        return [int(line) for line in (directory / "cgroup.procs").read_bytes().split()]
    except OSError as error:
        raise_own(error)
        return []


def _is_pods(path: str) -> bool:
    return any(_PODS.fullmatch(part) for part in path.split("/"))


def is_containers(path: str) -> bool:
    """Whether a cgroup is a container's or pod's, or above these, by runtimes' names for them."""
    return _is_pods(path) or any(_CONTAINERS.fullmatch(part) for part in path.split("/"))
