"""Each journey of docs/architecture.md is run, and passes the steps that the page names."""

import asyncio
import os
import pathlib
import re
import socket
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.api.conditions import sockets
from agent.client.conditions import ConditionPublisher
from agent.lab import agent_process
from agent.policy.api_source import QUERY
from bpf import abi
from tests import polling
from tests.agent.api.conditions.node import OWNERS
from tests.kernel import line_info, nodeclient, offers, traffic
from tests.kernel.cgroups import Cgroup
from tests.kernel.strictnode import RANGE4, RANGE6
from tests.node.node import NAMESPACE, PORT, Node, reason_of, status_of
from tests.tracing.journeys import PAGE, Journey, Step, journeys, problems
from tests.tracing.trace import Entry, Trace

pytestmark = pytest.mark.kernel

ROOT = pathlib.Path(__file__).parents[2]
POD = "journey"
# host-local gives it to the runtime's first pod.
ADDRESS = "198.18.16.2"
# No probe names it, so that whatever handles it handles the packet, or the policy.
OTHER_PORT = 40123


@pytest.fixture
def trace(node: Node, tmp_path: pathlib.Path) -> Iterator[Trace]:
    """Of the agent, its relay and commands that the test starts."""
    directory = tmp_path / "trace"
    directory.mkdir()
    made = Trace(directory)
    # What is forked has started before.
    node.operator.launch = node.operator.launch_command = agent_process.execute
    with made.recording():
        yield made


async def run_pod(node: Node, **metadata: Any) -> None:
    node.create(POD, **metadata)
    await node.run_pod(POD)
    await node.ready(POD)


def journey(title: str) -> Journey:
    return journeys()[title]


def check(journey: Journey, steps: Iterable[Step], entries: Sequence[Entry]) -> None:
    """Fail with one sentence for each step that is not as on the page."""
    if found := problems(journey, steps, entries):
        pytest.fail("\n".join([f"{PAGE}:", *found]), pytrace=False)


def python(steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if step.is_python]


def in_relay(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.stack[-1][0] == "agent/relay/__main__.py"]


def connections(report: AgentReport) -> int:
    """Of the kubelet, that the relay has proxied to the pod."""
    return sum(sum(port.outcomes.values()) for port in status_of(report, POD).relayed)


def is_admitted() -> bool:
    """Whether a connect to the other port arrives: the pod rejects it, since nothing listens."""
    try:
        return not traffic.is_dropped(ADDRESS, OTHER_PORT)
    except ConnectionRefusedError:
        return True


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=polling.PATIENCE_SECONDS) as response:
        content: bytes = response.read()
    return content.decode()


def maps_of(step: Step) -> set[str]:
    """The maps that a step names."""
    return set(step.words) & {spec.name for spec in abi.MAPS}


def maps_in(step: Step) -> set[str]:
    """The maps that a file of Python uses."""
    constants = re.findall(r"\babi\.([A-Z][A-Z0-9_]*)\b", (ROOT / step.path).read_text("utf-8"))
    specs = [getattr(abi, constant) for constant in constants]
    return {spec.name for spec in specs if isinstance(spec, abi.MapSpec)}


async def test_pod_to_condition_and_probe_result_to_condition(node: Node, trace: Trace) -> None:
    await node.start_agent()
    with trace.following(rf"{POD}|{ADDRESS}") as entries:
        await run_pod(node)
    to_gate, to_condition = (pod := journey("Pod to condition")).lists
    check(pod, to_gate, entries)
    check(pod, to_condition, entries)
    (steps,) = (probe := journey("Probe result to condition")).lists
    check(probe, steps, entries)


async def test_condition_of_another_owner_to_the_api(node: Node, trace: Trace) -> None:
    domain = "gpu.example.com"
    spec = {"reporters": [{"user": os.getuid()}]}
    await node.start_agent("--condition-owners=api")
    await run_pod(node)
    socket_path = sockets.conditions(node.operator.run_directory)
    with (
        ConditionPublisher(domain, f"unix:{socket_path}") as publisher,
        trace.following(rf"{domain}|{POD}") as entries,
    ):
        owner_object = {"metadata": {"name": domain, "uid": domain}, "spec": spec}
        node.server.put(owner_object, path=OWNERS)
        publisher.set(f"uid-{POD}", "healthy", "True", "SelfTestPassed")
        await node.until("the condition", lambda: node.condition(POD, f"{domain}/healthy"))
    (steps,) = (owner := journey("Condition of another owner to the API")).lists
    check(owner, steps, entries)


async def test_packet_to_metric_and_to_drops(node: Node, trace: Trace) -> None:
    await node.start_agent()
    await run_pod(node)
    report = await node.report("the gate", lambda report: reason_of(report, POD) == "Enforced")
    (gate,) = status_of(report, POD).gates
    # Of UDP, since a hook rejects a connect before there is a packet.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"", (ADDRESS, OTHER_PORT))
    to_metric, to_drops = (packet := journey("Packet to metric and to `drops`")).lists

    with trace.following(rf"\b{gate.ifindex}: |{POD}") as entries:
        metrics = await asyncio.to_thread(get, f"http://{report.http_address}/metrics")
    assert re.search(rf'podgate_gate_packets_total{{.*"{POD}".*"node".*"drop".*}} [1-9]', metrics)
    check(packet, python(to_metric), entries)

    with trace.following(str(OTHER_PORT)) as entries:
        where = ("--run-directory", str(node.operator.run_directory))
        shown = await asyncio.to_thread(node.operator.run, "drops", *where)
    assert f"udp {OTHER_PORT}" in shown.stdout
    check(packet, python(to_drops), entries)


def test_gate_consists_of_the_files_that_a_packet_passes(isolated: None) -> None:
    files = line_info.files_of("gate_egress")
    for steps in journey("Packet to metric and to `drops`").lists:
        passed = [step.path for step in steps if not step.is_python]
        assert [path for path in files if path in passed] == passed
        reader = next(step for step in steps if step.is_python)
        assert set(maps_of(steps[len(passed) - 1])) & maps_in(reader)


async def test_kubelets_connection_in_strict(
    node: Node, trace: Trace, kubelet_cgroup: Cgroup
) -> None:
    offers.need_netns_cookie()
    ranges = ("--relay-range4", RANGE4, "--relay-range6", RANGE6)
    await node.start_agent(*ranges)
    targets, connection, back = (strict := journey("The kubelet's connection in strict")).lists
    with trace.following(rf"{POD}|{ADDRESS}") as entries:
        await run_pod(node, labels={labels.MODE_LABEL: "strict"})
        await node.report("the relay", lambda report: reason_of(report, POD) == "Strict")
    check(strict, targets, entries)

    with nodeclient.node_client(kubelet_cgroup) as kubelet:
        # In the relay each function that has an argument.
        with trace.following("^") as entries:
            target = f"http,{ADDRESS},{PORT}"
            assert await asyncio.to_thread(kubelet.probe, [target]) == {target: nodeclient.OK}
        check(strict, python(connection), in_relay(entries))

        await node.report("one connection", lambda report: connections(report) == 1)
        with trace.following(f"{POD}.*'proxied'") as entries:
            assert await asyncio.to_thread(kubelet.probe, [target]) == {target: nodeclient.OK}
            await node.report("two connections", lambda report: connections(report) == 2)
    check(strict, back, entries)


async def test_host_access_policy_to_the_gates_map(node: Node, trace: Trace) -> None:
    await node.start_agent()
    await run_pod(node)
    spec = {
        "pods": {"namespaces": [NAMESPACE]},
        "from": [{"anyProcess": {}}],
        "ports": [{"port": OTHER_PORT}],
    }
    with trace.following(str(OTHER_PORT)) as entries:
        assert not is_admitted()
        node.server.put({"metadata": {"name": POD, "uid": POD}, "spec": spec}, path=QUERY.path)
        await node.until("a way in", is_admitted)
    (steps,) = (policy := journey("HostAccessPolicy to the gate's map")).lists
    check(policy, steps, entries)
