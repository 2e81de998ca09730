"""Cgroups of a node: the kubelet's root in each hierarchy, and the daemons' beside its pods.

Where version 1 has the CPU controller, daemons outside of a cgroup would each weigh as much as all
pods together, and a busy node's agent would get a fraction of what a real one gives it. systemd has
all of them in system.slice, of 1024 shares (systemd.resource-control(5), "CPUWeight"); the kubelet
gives its pods 1024 for each processor (pkg/kubelet/cm/node_container_manager_linux.go).
"""

import pathlib

from agent.linux.cgroups import cgroup2_mount

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_CPU = _CGROUPS / "cpu"
_SLICE = "system.slice"
_SHELL = (
    'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit; shift; done; shift; exec "$@"'
)


def make(root: str) -> None:
    """A node's root, by its path, in all hierarchies of version 1, which the kubelet requires."""
    for settings in _CGROUPS.glob("*/cgroup.clone_children"):
        (settings.parent / root).mkdir(parents=True, exist_ok=True)
    if (_CPU / root).is_dir():
        (_CPU / root / _SLICE).mkdir(exist_ok=True)


def command_in(cgroup: pathlib.Path, command: list[str]) -> list[str]:
    """The command that starts in a cgroup of version 2, and in the slice of its node, if any."""
    directories = map(str, (cgroup, *_slices(cgroup)))
    return ["sh", "-c", _SHELL, "sh", *directories, "--", *command]


def move_into_slice(pid: int, cgroup: pathlib.Path) -> None:
    """As `command_in`, for a daemon that started before its node's root was made."""
    for directory in _slices(cgroup):
        (directory / "cgroup.procs").write_text(str(pid))


def _slices(cgroup: pathlib.Path) -> list[pathlib.Path]:
    """The slice of the node that has this cgroup, if any."""
    mount = cgroup2_mount()
    assert mount is not None, "cgroup v2 is not mounted"
    # The last one is the machine's own root.
    roots = list(cgroup.relative_to(mount).parents)[:-1]
    found = (_CPU / root / _SLICE for root in roots)
    return [directory for directory in found if directory.is_dir()][:1]
