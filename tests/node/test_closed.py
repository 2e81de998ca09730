"""From its first moment on no process of the node reaches an enforced pod, but for the kubelet."""

import asyncio
import shutil
import signal
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from agent.cri import sandbox_netns
from agent.cri.client import RuntimeClient
from agent.default_deny import table as default_deny_table
from agent.lab.kubelet_stub import KubeletStub
from agent.logs import Event
from bpf import pins
from probes.netns import Netns
from tests.kernel import cgroups, dialling, offers
from tests.kernel.cgroups import Cgroup
from tests.kernel.dialling import PORT
from tests.node.node import Node, reason_of
from tests.runtime.containerd import Containerd

pytestmark = pytest.mark.kernel

# host-local gives the runtime's pods one after the other.
ADDRESSES = ("198.18.16.2", "198.18.16.3", "198.18.16.4")


@pytest.fixture
async def kubelet() -> AsyncIterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


async def netns_of(runtime: Containerd, sandbox: str) -> Netns:
    client = RuntimeClient(runtime.socket)
    try:
        found = await sandbox_netns.locate(await client.sandbox_details(sandbox))
    finally:
        await client.aclose()
    assert found.netns is not None, found.problem
    return found.netns


def serve(netns: Netns) -> socket.socket:
    """A server that is there before any container is, as a fast application would be."""
    server = netns.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.bind(("", PORT))
    server.listen()
    return server


async def test_early_client_never_connects_to_an_enforced_pod(node: Node, kubelet: Cgroup) -> None:
    """The default-deny table covers the window between the interface and its gate."""
    offers.need_default_deny()
    await node.start_agent("--kubelet", f"cgroup:{kubelet.path}")
    await node.report("the agent", lambda report: report.is_synced)
    with dialling.dialling(*ADDRESSES) as dialler:
        for name in ("one", "two", "three"):
            node.create(name)
            await node.run_pod(name)
        await node.ready("one", "two", "three")
        await asyncio.to_thread(dialler.go_on)
        assert dialler.connected == 0
    # They were there to be reached.
    stub = KubeletStub(kubelet.directory)
    try:
        for address in ADDRESSES:
            assert stub.probe("tcp", address, PORT) == "success"
    finally:
        stub.stop()


async def test_early_connect_of_the_kubelet_succeeds(node: Node, kubelet: Cgroup) -> None:
    """As a postStart hook: before the API shows the pod's address, with or without a gate."""
    stub = KubeletStub(kubelet.directory)
    try:
        await node.start_agent("--kubelet", f"cgroup:{kubelet.path}")
        await node.report("the agent", lambda report: report.is_synced)
        for name, address in zip(("one", "two", "three"), ADDRESSES, strict=True):
            node.create(name)
            sandbox = await node.driver.run_sandbox(name)
            with serve(await netns_of(node.runtime, sandbox)):
                assert stub.probe("tcp", address, PORT) == "success"
    finally:
        stub.stop()


async def test_strict_start_runs_no_container_before_its_gate(node: Node) -> None:
    """As after a reboot: tasks, pins and /run are gone, and the agent is late."""
    options = (
        *("--cni-conf-dir", str(node.runtime.cni_directory)),
        *("--cni-bin-dir", str(node.runtime.plugins), "--cni-strict-start"),
    )
    await node.start_agent(*options)
    [conflist] = node.runtime.cni_directory.glob("*.conflist")
    await node.until("podgate-cni", lambda: "podgate-cni" in conflist.read_text())
    node.create("web")
    before = await node.run_pod("web")
    await node.ready("web")
    await node.stop_agent(signal.SIGKILL)
    await node.driver.stop_sandbox(before)
    shutil.rmtree(node.operator.run_directory)
    pins.Pins(node.operator.bpffs).remove_everything()
    await default_deny_table.remove()

    with dialling.dialling(*ADDRESSES) as dialler:
        with pytest.raises(grpc.aio.AioRpcError, match="podgate"):
            await node.driver.run_sandbox("web", attempt=1)
        await node.start_agent(*options)
        await node.report("the agent", lambda report: report.is_synced)
        # What is left to close the window is the plugin.
        await default_deny_table.remove()
        await node.run_pod("web", attempt=2)
        await node.ready("web")
        await asyncio.to_thread(dialler.go_on)
        assert dialler.connected == 0
    assert (
        "podgate_sandbox_ungated_duration_seconds_count 0.0" in (await node.get_http("/metrics"))[1]
    )


async def test_late_agent_reports_how_long_pods_had_no_gate(node: Node) -> None:
    for name in ("one", "two"):
        node.create(name)
        await node.run_pod(name)
    await node.start_agent()
    await node.ready("one", "two")
    late = list(node.operator.log_lines(Event.CONTAINERS_STARTED_BEFORE_GATE))
    assert {line["pod"] for line in late} == {"tests/one", "tests/two"}
    assert all(line["ungated_seconds"] > 0 and line["level"] == "warning" for line in late)
    _, metrics = await node.get_http("/metrics")
    assert "podgate_sandbox_ungated_duration_seconds_count 2.0" in metrics

    # Gates that an earlier agent left are no window.
    await node.stop_agent()
    await node.start_agent()
    await node.report("gates", lambda report: reason_of(report, "two") == "Enforced")
    _, metrics = await node.get_http("/metrics")
    assert "podgate_sandbox_ungated_duration_seconds_count 0.0" in metrics
