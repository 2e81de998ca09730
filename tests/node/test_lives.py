"""A pod's life in a cluster, from its creation to its deletion."""

import asyncio
import pathlib
from typing import Any

import pytest

from agent import labels
from agent.logs import Event
from tests.agent.kube.apiserver import Json
from tests.node.node import READY, Node, reason_of, status_of

pytestmark = pytest.mark.kernel

BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
ASLEEP = ("/bin/sleep", "1000000")


async def test_pod_is_gated_probed_and_ready_until_it_ends(node: Node) -> None:
    await node.start_agent()
    begun = asyncio.get_running_loop().time()
    node.create("web")
    sandbox = await node.run_pod("web")
    await node.ready("web")

    isolation = node.condition("web", labels.ISOLATION_READY)
    assert isolation["reason"] == "Enforced"
    assert isolation["message"].endswith(f"(sandbox {sandbox[:12]}, boot {BOOT})")
    assert node.condition("web", labels.PROBES_PASSING)["reason"] == "ProbesPassing"
    # One for each, or for both if the machine is busy; if the start takes more than 3 s, a waiting
    # reason comes before.
    patches = node.patches("web")
    assert len(patches) <= 3
    first, *_ = patches[0].body["status"]["conditions"]
    assert first["type"] == labels.ISOLATION_READY
    assert first["status"] == "True" or patches[0].at - begun >= 3
    assert patches[-1].body["metadata"] == {"uid": "uid-web"}
    assert len(patches[-1].body["status"]["conditions"]) == 2
    report = await node.report("a gate", lambda report: status_of(report, "web").gates)
    assert status_of(report, "web").source == "api"
    # Later than the conditions: only when two lists of all sandboxes have been worked off.
    await node.serves("/readyz", 200)

    node.change("web", lambda pod: pod["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))
    # The end of a pod that is not being deleted, as far as the agent knows, is a warning.
    await node.saved("web")
    await node.driver.stop_sandbox(sandbox)
    await node.report("no gate", lambda report: not status_of(report, "web").gates)
    node.delete("web")
    await node.driver.remove_sandbox(sandbox)
    await node.report("nothing", lambda report: not report.pods)
    _, metrics = await node.get_http("/metrics")
    assert 'pod="web"' not in metrics
    # Whether the container starts before the gate is up to the runtime here, and whether its server
    # listens before the first probe to the machine.
    late = Event.CONTAINERS_STARTED_BEFORE_GATE.key
    lines = [line for line in node.operator.log_lines() if line.get("pod") == "tests/web"]
    assert lines
    loud = [
        line
        for line in lines
        if line["level"] != "info"
        and line["event"] != late
        and not (line.get("reason") == "ProbeFailing" and line["was"] != "True")
    ]
    assert loud == [], loud


async def test_restarted_container_is_probed_again(node: Node) -> None:
    await node.start_agent()
    node.create("web")
    sandbox = await node.driver.run_sandbox("web")
    first = await node.driver.start_container(sandbox)
    await node.ready("web")

    await node.driver.stop_container(first)
    second = await node.driver.start_container(sandbox, attempt=1, command=ASLEEP)
    await node.until("the second's failure", lambda: reason(node) == "ProbeFailing")
    assert "refused" in node.condition("web", labels.PROBES_PASSING)["message"]
    assert node.condition("web", labels.ISOLATION_READY)["status"] == "True"

    await node.driver.stop_container(second)
    await node.until("its end", lambda: reason(node) == "ContainerNotRunning")
    await node.driver.start_container(sandbox, attempt=2)
    await node.ready("web")


async def test_readiness_is_followed_while_a_pod_is_being_deleted(node: Node) -> None:
    await node.start_agent()
    node.create("web")
    sandbox = await node.driver.run_sandbox("web")
    container = await node.driver.start_container(sandbox)
    await node.ready("web")

    node.change("web", lambda pod: pod["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))
    await node.driver.stop_container(container)
    await node.until("its end", lambda: reason(node) == "ContainerNotRunning")
    assert node.condition("web", labels.ISOLATION_READY)["status"] == "True"


async def test_probes_wait_for_a_startup_probe_that_only_the_kubelet_runs(node: Node) -> None:
    startup = {"startupProbe": {"exec": {"command": ["true"]}}}
    await node.start_agent()
    node.create("web", container={**READY, **startup})
    sandbox = await node.driver.run_sandbox("web")
    container = await node.driver.start_container(sandbox)
    await node.until("waiting", lambda: reason(node) == "ProbePending")

    def start(pod: Json) -> None:
        status = {"name": "app", "containerID": f"containerd://{container}", "started": True}
        pod["status"]["containerStatuses"] = [status]

    node.change("web", start)
    await node.ready("web")

    await node.driver.stop_container(container)
    await node.driver.start_container(sandbox, attempt=1)
    # The API's status is of another container.
    await node.until("waiting again", lambda: reason(node) == "ProbePending")


@pytest.mark.parametrize(
    "container",
    [{}, {"readinessProbe": {"exec": {"command": ["true"]}}}],
    ids=["none", "exec"],
)
async def test_gate_without_probes_is_true_with_a_reason(
    node: Node, container: dict[str, Any]
) -> None:
    await node.start_agent()
    node.create("web", container=container)
    await node.run_pod("web")
    await node.ready("web")
    assert reason(node) == "NoProbes"
    assert "no container has" in node.condition("web", labels.PROBES_PASSING)["message"].lower()


async def test_host_network_pod_has_no_gate(node: Node) -> None:
    await node.start_agent()
    node.create("web")
    node.change("web", lambda pod: pod["spec"].update(hostNetwork=True))
    await node.driver.run_sandbox("web", host_network=True)
    await node.ready("web")
    assert reason(node) == "HostNetwork"


async def test_pod_without_a_readiness_gate_is_gated_and_not_written(node: Node) -> None:
    await node.start_agent()
    node.create("web", is_gated=False)
    await node.run_pod("web")
    report = await node.report("a gate", lambda report: reason_of(report, "web") == "Enforced")
    assert status_of(report, "web").probes == []
    # Another pod's conditions went out meanwhile, so this one's would have.
    node.create("api")
    await node.run_pod("api")
    await node.ready("api")
    assert node.patches("web") == []


async def test_modes_come_from_node_namespace_and_pod(node: Node) -> None:
    await node.start_agent()
    node.create("web", labels={labels.MODE_LABEL: "audit"})
    await node.run_pod("web")
    await node.ready("web")
    # A pod may not open itself.
    assert node.condition("web", labels.ISOLATION_READY)["reason"] == "Enforced"
    node.label_namespace({labels.MODE_LABEL: "audit"})
    await node.until("audit", lambda: isolation_reason(node) == "Audit")


def reason(node: Node) -> str:
    return str(node.condition("web", labels.PROBES_PASSING).get("reason", ""))


def isolation_reason(node: Node) -> str:
    return str(node.condition("web", labels.ISOLATION_READY).get("reason", ""))
