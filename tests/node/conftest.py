"""A node of a cluster for each test: container runtime, API server, and agent."""

import pathlib
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from agent.app import removal
from agent.default_deny import table as default_deny_table
from agent.lab.agent_process import AgentProcess, Launch
from bpf import pins
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import write_kubeconfig
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup
from tests.kernel.conftest import installed, installed_pins, plugin
from tests.node.node import Node
from tests.runtime.conftest import driver, runtime
from tests.runtime.containerd import Containerd
from tests.runtime.driving import Driver

__all__ = ["driver", "installed", "installed_pins", "plugin", "runtime"]


@pytest.fixture
def kubelet_cgroup() -> Iterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
async def node(
    runtime: Containerd,
    driver: Driver,
    installed_pins: pins.Pins,
    launch: Launch,
    kubelet_cgroup: Cgroup,
    tmp_path: pathlib.Path,
) -> AsyncIterator[Node]:
    """No agent runs yet; none outlives the test."""
    operator = AgentProcess(tmp_path, installed_pins.bpffs, launch)
    made = Node(runtime, driver, ApiServer(), operator)
    await made.start_api()
    write_kubeconfig(made.kubeconfig, f"http://127.0.0.1:{made.server.port}")
    operator.kubelet = ("--kubelet", f"cgroup:{kubelet_cgroup.path}")
    try:
        yield made
    finally:
        operator.stop(signal.SIGKILL)
        await removal.remove_relays()
        await made.stop_api()
        await default_deny_table.remove()
