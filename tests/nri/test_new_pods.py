"""New pods have their gate before their first container, by real runtimes."""

import asyncio
import os
import pathlib
import signal
import time

import pytest

from agent import labels
from agent.nri.plugin import NewPod, PluginProtocol
from tests import polling
from tests.node.node import PORT, Node
from tests.nri import recording
from tests.runtime.host_process import HostProcess

pytestmark = pytest.mark.kernel

SOCKET = pathlib.Path("/run/nri/nri.sock")
_CONNECT_SECONDS = 0.02
_PODS = 12


async def connected(node: Node, *options: str) -> None:
    """An agent that the runtime calls."""
    await node.start_agent(*options)
    await node.report("NRI", lambda report: report.components.get("nri"))


async def results(node: Node) -> dict[str, float]:
    """Pods that started by NRI, by result."""
    _, text = await node.get_http("/metrics")
    return {
        name: float(value)
        for line in text.splitlines()
        if line.startswith("podgate_nri_pods_total{")
        for name, value in [(line.split('"')[1], line.split()[-1])]
    }


async def test_sandbox_is_complete_when_its_gate_is_in_force(node: Node) -> None:
    await connected(node)
    node.create("web")
    sandbox = await node.driver.run_sandbox("web")
    (gated,) = [one for one in node.operator.log_lines() if one["event"] == "interface_gated"]
    assert (gated["pod"], gated["mode"]) == ("tests/web", "enforce")
    assert await results(node) == {"gated": 1, "late": 0, "none": 0}
    await node.driver.start_container(sandbox)
    await node.ready("web")


async def test_no_host_process_reaches_pods_that_start_at_once(node: Node) -> None:
    # The table that blocks pods before their gate is not what holds it back.
    node.label_namespace({labels.MODE_LABEL: "enforce"})
    await connected(node, "--mode", "audit")
    addresses = node.runtime.directory / "ipam" / "pods"
    names = [f"web{number}" for number in range(_PODS)]
    for name in names:
        node.create(name)
    with HostProcess(addresses, PORT, _CONNECT_SECONDS) as host:
        await asyncio.gather(*(node.run_pod(name) for name in names))
        await node.ready(*names)
        await asyncio.sleep(0.2)
    assert len(host.tried) >= _PODS
    assert host.reached == set()
    assert await results(node) == {"gated": _PODS, "late": 0, "none": 0}


async def test_host_network_pod_starts_without_a_gate(node: Node) -> None:
    await connected(node)
    await node.driver.run_sandbox("agent", host_network=True)
    assert await results(node) == {"gated": 0, "late": 0, "none": 1}


async def test_pod_in_mode_off_waits_for_no_gate(node: Node) -> None:
    node.label_namespace({labels.MODE_LABEL: "off"})
    await connected(node)
    node.create("web")
    started = time.monotonic()
    await node.driver.run_sandbox("web")
    assert time.monotonic() - started < polling.PATIENCE
    assert not [one for one in node.operator.log_lines() if one["event"] == "interface_gated"]
    assert (await results(node))["late"] == 0


async def test_pod_that_the_api_does_not_have_yet_has_the_mode_of_its_namespace(
    node: Node,
) -> None:
    node.label_namespace({labels.MODE_LABEL: "enforce"})
    await connected(node, "--mode", "audit")
    await node.driver.run_sandbox("web")
    (gated,) = [one for one in node.operator.log_lines() if one["event"] == "interface_gated"]
    assert gated["mode"] == "enforce"


async def test_agent_that_is_killed_keeps_no_pod_from_starting(node: Node) -> None:
    await connected(node)
    await node.stop_agent(signal.SIGKILL)
    node.create("web")
    await node.run_pod("web")
    await connected(node)
    await node.ready("web")


async def test_runtime_that_restarts_calls_the_agent_again(node: Node) -> None:
    await connected(node)
    node.runtime.stop()
    await node.report("no NRI", lambda report: not report.components.get("nri"))
    node.runtime.start()
    await node.report("NRI again", lambda report: report.components.get("nri"))
    node.create("web")
    await node.run_pod("web")
    await node.ready("web")
    assert (await results(node))["gated"] == 1


async def test_condition_from_before_a_reboot_is_corrected_before_the_container_starts(
    node: Node,
) -> None:
    """Another boot is one of another id, which the API server's conditions contain."""
    await connected(node)
    pod = node.create("web")
    for kind in (labels.ISOLATION_READY, labels.PROBES_PASSING):
        message = "All is well (sandbox 0123456789ab, boot 00000000-0000-0000-0000-000000000000)"
        pod["status"].setdefault("conditions", []).append(
            {"type": kind, "status": "True", "reason": "Old", "message": message}
        )
    node.server.put(pod)
    sandbox = await node.driver.run_sandbox("web")
    for kind in (labels.ISOLATION_READY, labels.PROBES_PASSING):
        assert f"(sandbox {sandbox[:12]}, " in str(node.condition("web", kind)["message"])
    assert node.condition("web", labels.PROBES_PASSING)["status"] == "False"
    await node.driver.start_container(sandbox)
    await node.ready("web")


async def test_connection_is_as_recorded(
    node: Node, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    """What this runtime sends, in the order of the record that the unit tests replay. With
    PODGATE_TEST_RECORD=1 the record is written."""
    existing = await node.run_pod("existing")
    proxy = tmp_path / "nri.sock"
    async with recording.between(SOCKET, proxy) as pieces:
        await connected(node, "--nri-socket", str(proxy))
        node.create("web")
        sandbox = await node.run_pod("web")
        await node.driver.run_sandbox("agent", host_network=True)
        await node.end_pod(sandbox)
        await node.end_pod(existing)
        await node.stop_agent()
    name = request.node.callspec.params["runtime"]
    path = recording.RECORDED / f"{name}.jsonl"
    if os.environ.get("PODGATE_TEST_RECORD"):
        recording.write(path, pieces)
    assert _started(pieces) == _started(recording.read(path))


def _started(pieces: list[recording.Piece]) -> list[str]:
    """The pods that start, by name; "" for one without a network of its own."""
    protocol = PluginProtocol()
    happened = [
        one for side, content in pieces if side == "runtime" for one in protocol.receive(content)
    ]
    return [
        one.sandbox.sandbox.pod_name if one.sandbox else ""
        for one in happened
        if isinstance(one, NewPod)
    ]
