"""Pods whose processes may change the node's interfaces, by stand-ins for namespaces and /proc."""

import dataclasses
import pathlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding import found
from agent.linux.procfs import Procfs
from agent.operate.doctor import capabilities
from agent.operate.doctor.results import Passed
from probes.netns import NetnsError
from tests.agent.operate.page.reports import pod, report

NONE = [Passed("net-admin", "No pod has CAP_NET_ADMIN without a user namespace of its own.")]
CAP_NET_ADMIN = 12


@dataclasses.dataclass
class Process:
    namespace: str
    capability: int = CAP_NET_ADMIN
    cgroup: str = "/pod"


class Processes:
    """By pid. The agent's own is 42, in the cgroup /agent."""

    def __init__(self, *processes: Process) -> None:
        self._all = dict(enumerate((Process("net:[1]", cgroup="/agent"), *processes), 42))

    def pids(self) -> list[int]:
        return list(self._all)

    def namespace(self, pid: int, kind: str) -> str:
        assert kind == "net"
        return self._all[pid].namespace

    def has_capability(self, pid: int, capability: int) -> bool:
        return self._all[pid].capability == capability

    def cgroup(self, pid: int) -> str:
        return self._all[pid].cgroup


@pytest.fixture(autouse=True)
def namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network namespace of pod web has inode 7, that of db 8; others cannot be opened."""

    def opened(path: str) -> Any:
        inodes = {"web": 7, "db": 8}
        if (name := pathlib.Path(path).name) not in inodes:
            raise NetnsError("it is gone")
        return SimpleNamespace(inode=inodes[name])

    monkeypatch.setattr(capabilities, "Netns", SimpleNamespace(open=opened))


PODS = [
    pod("none", netns=None),
    *(pod(name, netns=f"/run/{name}") for name in ("gone", "web", "db")),
]


@pytest.mark.parametrize(
    ("processes", "names"),
    [
        ((), ""),
        ((Process("net:[9]"), Process("net:[1]")), ""),
        ((Process("net:[7]", capability=13), Process("net:[7]", cgroup="/agent")), ""),
        ((Process("net:[7]", capability=0), Process("net:[7]")), "shop/web"),
        ((Process("net:[7]"), Process("net:[8]"), Process("net:[7]")), "shop/db, shop/web"),
    ],
)
def test_pods_with_the_right_in_the_hosts_user_namespace_are_named(
    processes: tuple[Process, ...], names: str
) -> None:
    checked = capabilities.check(report(*PODS), cast(Procfs, Processes(*processes)))
    text = (
        "Pods with CAP_NET_ADMIN and without a user namespace may remove or change interfaces of "
        f"the node and of other pods: {names}"
    )
    assert checked == ([found(kinds.NET_ADMIN_PODS, text)] if names else NONE)


def test_node_without_pods_has_no_such_check() -> None:
    assert capabilities.check(report(), cast(Procfs, Processes())) == []
