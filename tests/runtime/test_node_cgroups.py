"""Daemons of a test's node start in the cgroups that a real node gives them."""

import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from agent.linux.cgroups import cgroup2_mount
from tests.runtime import node_cgroups, reaper

_NAME = f"podgate-node-cgroups-{os.getpid()}"
_HAS_VERSION_1 = pathlib.Path("/sys/fs/cgroup/cpu").is_dir()


def _slice(root: str) -> str | None:
    """The path that a daemon of this node has in version 1's hierarchy of the CPU controller."""
    return f"/{root}/system.slice" if _HAS_VERSION_1 else None


@pytest.fixture
def top() -> Iterator[pathlib.Path]:
    """A cgroup of version 2, and those of this name in other hierarchies, until the test's end."""
    mount = cgroup2_mount()
    assert mount is not None
    made = mount / _NAME
    made.mkdir()
    yield made
    assert reaper.end(_NAME)


def _paths(cgroup: pathlib.Path) -> dict[str, str]:
    """Those of a daemon that starts in this cgroup."""
    cgroup.mkdir(exist_ok=True)
    command = node_cgroups.command_in(cgroup, ["cat", "/proc/self/cgroup"])
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return _parsed(shown)


def _own() -> dict[str, str]:
    return _parsed(pathlib.Path("/proc/self/cgroup").read_text())


def _parsed(shown: str) -> dict[str, str]:
    """Paths by hierarchy, of version 2 by "" (cgroups(7), "/proc/[pid]/cgroup")."""
    lines = [line.split(":", 2) for line in shown.splitlines()]
    return {name: path for _, names, path in lines for name in names.split(",")}


def test_daemon_shares_the_cpu_with_the_nodes_pods_as_one_of_its_slice(top: pathlib.Path) -> None:
    node_cgroups.make(_NAME)
    found = _paths(top / "kubelet.service")
    assert found[""].endswith(f"/{_NAME}/kubelet.service")
    assert found.get("cpu") == _slice(_NAME)


def test_each_of_several_nodes_has_a_slice(top: pathlib.Path) -> None:
    (top / "one").mkdir()
    for root in (_NAME, f"{_NAME}/one"):
        node_cgroups.make(root)
    assert _paths(top / "one" / "kubelet").get("cpu") == _slice(f"{_NAME}/one")
    assert _paths(top / "etcd").get("cpu") == _slice(_NAME)


def test_daemon_of_no_node_stays_in_the_machines_group(top: pathlib.Path) -> None:
    assert _paths(top / "etcd").get("cpu") == _own().get("cpu")


def test_daemon_that_runs_is_moved(top: pathlib.Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as daemon:
        node_cgroups.make(_NAME)
        node_cgroups.move_into_slice(daemon.pid, top / "daemon")
        found = _parsed(pathlib.Path(f"/proc/{daemon.pid}/cgroup").read_text())
        daemon.communicate(timeout=60)
    assert found.get("cpu") == _slice(_NAME)
