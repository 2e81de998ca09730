"""Each journey of docs/architecture.md is run, and passes the steps that the page names."""

import asyncio
import contextlib
import errno
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agent import labels
from agent.admin.report import AgentReport
from agent.api.conditions import sockets
from agent.client.conditions import ConditionPublisher
from agent.controller.policy_status import PROGRAMMED
from agent.kube import node_report
from agent.kube.objects import ObjectMetadata
from agent.lab import agent_process
from agent.policy import api_source
from agent.policy.api_source import QUERY
from agent.policy.egress_types import HOST_EGRESS
from bpf import host_egress, map_specs
from tests import polling
from tests.agent.api.conditions.node import OWNERS
from tests.agent.controller.leases import Leases
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import ApiServer
from tests.kernel import cgroups, line_info, nodeclient, offers, traffic
from tests.kernel.cgroups import Cgroup
from tests.kernel.strictnode import RANGE4, RANGE6
from tests.kernel.test_policy_sources import UIDS, Kubelet
from tests.node.node import NAME, NAMESPACE, PORT, Node, reason_of, status_of
from tests.nodes.worker import Worker
from tests.processes import BARE_PYTHON
from tests.tracing.journeys import PAGE, Journey, Step, journeys, problems
from tests.tracing.trace import Entry, Trace

pytestmark = pytest.mark.kernel

ROOT = pathlib.Path(__file__).parents[2]
POD = "journey"
# host-local gives it to the runtime's first pod.
ADDRESS = "198.18.16.2"
# No probe names it, so that whatever handles it handles the packet, or the policy.
OTHER_PORT = 40123

EGRESS = "A hostNetwork pod's connect to a HostEgressPolicy's metric and status"
EGRESS_NAME = "journey-egress"
EGRESS_PATH = api_source.query(HOST_EGRESS).path
CONNECT = """
import socket, sys
sys.exit(socket.socket().connect_ex(("127.0.0.1", int(sys.argv[1]))))
"""


@pytest.fixture
def trace(node: Node, worker: Worker, tmp_path: pathlib.Path) -> Iterator[Trace]:
    """Of the agent, its relay and commands that the test starts."""
    directory = tmp_path / "trace"
    directory.mkdir()
    made = Trace(directory, worker.made_once("traced-code", pathlib.Path.mkdir))
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
    return set(step.words) & {spec.name for spec in map_specs.MAPS}


def maps_in(step: Step) -> set[str]:
    """The maps that a file of Python uses."""
    constants = re.findall(
        r"\bmap_specs\.([A-Z][A-Z0-9_]*)\b", (ROOT / step.path).read_text("utf-8")
    )
    specs = [getattr(map_specs, constant) for constant in constants]
    return {spec.name for spec in specs if isinstance(spec, map_specs.MapSpec)}


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
    # Otherwise the pod itself may still be reconciled, with the newest rules.
    await node.saved(POD)
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


@pytest.fixture
def kubelet(isolated: None) -> Iterator[Kubelet]:
    with cgroups.cgroup(below=cgroups.root()) as top:
        yield Kubelet(top)


@contextlib.contextmanager
def controller(node: Node) -> Iterator[None]:
    """A replica runs during the block. The server answers as recorded for its Lease, and stores
    the status of policies."""
    Leases(node.server)
    node.server.faults.append(lambda request: store_status(node.server, request))
    addresses = ("--http-address=127.0.0.1:0", "--webhook-address=127.0.0.1:0")
    command = [sys.executable, "-m", "agent", "controller", f"--kubeconfig={node.kubeconfig}"]
    with node.kubeconfig.with_name("controller.log").open("wb") as output:
        process = subprocess.Popen([*command, *addresses], stdout=output, stderr=output)
        try:
            yield
        finally:
            process.kill()
            process.wait()


async def store_status(server: ApiServer, request: web.Request) -> web.StreamResponse | None:
    if request.method != "PATCH" or not request.path.startswith(EGRESS_PATH):
        return None
    current = server.get(EGRESS_NAME, namespace="", path=EGRESS_PATH)
    status = json.loads(await request.read())["status"]
    return web.json_response(server.put(current | {"status": status}, path=EGRESS_PATH))


def programmed(server: ApiServer) -> str:
    """The reason of the condition; empty without one."""
    status = server.get(EGRESS_NAME, namespace="", path=EGRESS_PATH).get("status", {})
    found = (one for one in status.get("conditions", ()) if one["type"] == PROGRAMMED)
    return next((one["reason"] for one in found), "")


async def test_connect_of_a_host_network_pod_to_a_policys_metric_and_status(
    node: Node, trace: Trace, kubelet: Kubelet
) -> None:
    offers.need_netns_cookie()
    to_kernel, to_metric, to_report, to_status = (egress := journey(EGRESS)).lists
    thing = apiserver.pod(POD, uid=UIDS[0], namespace=NAMESPACE)
    thing["spec"]["hostNetwork"] = True
    node.server.put(thing)
    await node.start_agent()
    policy = {
        "metadata": {"name": EGRESS_NAME, "uid": EGRESS_NAME, "generation": 1},
        "spec": {
            "subjects": [{"hostNetworkPods": {"namespaces": [NAMESPACE]}}],
            "deny": [{"cidr": "127.0.0.0/8", "ports": [{"port": OTHER_PORT}]}],
            "action": "Enforce",
        },
    }
    revision = node_report.revision([msgspec.convert(policy["metadata"], ObjectMetadata)])
    connect = [*BARE_PYTHON, "-c", CONNECT, str(OTHER_PORT)]
    with kubelet.pod(UIDS[0]) as container:
        with trace.following(f"{EGRESS_NAME}|{UIDS[0]}|{revision}") as entries:
            node.server.put(policy, path=EGRESS_PATH)
            await node.until("EPERM", lambda: container.run(connect).returncode == errno.EPERM)
            await node.until("a report", lambda: trace.has("agent/kube/node_report.py"))
            # The agent itself writes it within 20 s, at another time than other nodes.
            reports = {"policies": {"revision": ""}, "egressPolicies": {"revision": revision}}
            thing = {"metadata": {"name": NAME, "uid": NAME}, "status": reports}
            node.server.put(thing, path=node_report.PATH)
            with controller(node):
                await node.until("a status", lambda: programmed(node.server))
            assert programmed(node.server) == "Programmed"
        check(egress, to_kernel, entries)
        check(egress, to_report, entries)
        check(egress, to_status, entries)

        report = await node.report("an agent", lambda report: True)
        with trace.following(EGRESS_NAME) as entries:
            metrics = await asyncio.to_thread(get, f"http://{report.http_address}/metrics")
    name = f'podgate_host_egress_attempts_total{{policy="{EGRESS_NAME}",verdict="drop"}}'
    assert re.search(rf"{re.escape(name)} [1-9]", metrics)
    check(egress, python(to_metric), entries)


def test_egress_program_consists_of_the_files_that_a_connect_passes(isolated: None) -> None:
    files = line_info.files_of("egress_connect4")
    _, steps, _, _ = journey(EGRESS).lists
    passed = [step.path for step in steps if not step.is_python]
    assert [path for path in files if path in passed] == passed
    maps = {spec.name for spec in host_egress.PROGRAM_SET.maps}
    named = [word for path, step in zip(passed, steps, strict=False) for word in step.words]
    assert {word for word in named if "_" in word} - {"egress_connect4"} <= maps
