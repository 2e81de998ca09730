"""API server, container runtime or agent away, in every order: nothing opens, nothing is lost."""

import signal
from collections.abc import Callable

import pytest

from agent import labels
from agent.admin.report import AgentReport, GateStatus
from tests.agent.kube.apiserver import Json
from tests.kernel import traffic
from tests.node.node import NAME, PORT, Node, reason_of, status_of

pytestmark = pytest.mark.kernel

ASLEEP = ("/bin/sleep", "1000000")


async def test_restarted_runtime_changes_nothing(node: Node) -> None:
    await node.start_agent()
    node.create("web")
    await node.run_pod("web")
    await node.ready("web")
    before, patches = node.get("web"), len(node.patches("web"))
    gates = status_of(await report(node), "web").gates

    node.runtime.stop(signal.SIGKILL)
    seen = await node.report("its absence", lambda report: report.pod_source.problems)
    [problem] = seen.pod_source.problems
    assert problem.text.startswith("Container runtime: ")
    assert 'podgate_component_up{component="runtime"} 0.0' in (await node.get_http("/metrics"))[1]
    assert names_of(status_of(seen, "web").gates) == names_of(gates)
    assert str(node.runtime.socket) in await node.serves("/readyz", 503)

    node.runtime.start()
    await node.report("its return", lambda report: not report.pod_source.problems)
    # What comes after it is seen, and what was before it has stayed as it was.
    node.create("api")
    await node.run_pod("api")
    await node.ready("api")
    assert node.get("web")["status"] == before["status"]
    assert len(node.patches("web")) == patches
    assert names_of(status_of(await report(node), "web").gates) == names_of(gates)


async def test_kubelet_that_is_not_found_is_an_event_about_the_node_and_in_conditions(
    node: Node,
) -> None:
    await node.start_agent("--kubelet", "unit:podgate-nosuch.service")
    node.create("web")
    await node.run_pod("web")
    # Its probes are not affected, and it becomes ready.
    await node.ready("web")
    condition = node.condition("web", labels.ISOLATION_READY)
    assert "Kubelet not identified" in condition["message"]
    assert "/system.slice/podgate-nosuch.service" in condition["message"]
    assert "Kubelet not identified" in await node.serves("/readyz", 503)
    # On a slow node the first search ends without a result, which is another Event.
    await node.until(
        "the event",
        lambda: any(event["note"] in condition["message"] for event in events_of_node(node)),
    )
    events = events_of_node(node)
    assert {event["regarding"]["name"] for event in events} == {NAME}
    # Before the pod, no port was open. On a slow node its cgroup is not found for a while, either.
    reasons = {event["reason"] for event in events}
    assert reasons - {"KubeletUnknown", "PodsCgroupMissing"} == {"DeclaredPortsOpen"}


def events_of_node(node: Node) -> list[Json]:
    path = "/apis/events.k8s.io/v1/namespaces/default/events"
    return [one.body for one in node.server.of(path, method="POST")]


async def test_second_sandbox_of_a_pod_becomes_current(node: Node) -> None:
    await node.start_agent()
    node.create("web")
    first = await node.run_pod("web")
    await node.ready("web")
    [gate] = status_of(await report(node), "web").gates

    await node.driver.stop_sandbox(first)
    await node.until("the first's end", lambda: not node.is_ready("web"))
    second = await node.driver.run_sandbox("web", attempt=1)
    await node.until("a gate", lambda: is_of(second)(node.condition("web", labels.ISOLATION_READY)))
    # The first one's results do not apply to the second.
    assert node.condition("web", labels.PROBES_PASSING)["status"] == "False"
    await node.driver.start_container(second, attempt=1)
    await node.ready("web")
    assert is_of(second)(node.condition("web", labels.PROBES_PASSING))
    [other] = status_of(await report(node), "web").gates
    assert other.ifindex != gate.ifindex


async def test_restarted_agent_writes_no_unchanged_condition(node: Node) -> None:
    await node.start_agent()
    node.create("web")
    await node.run_pod("web")
    await node.ready("web")
    before, patches = node.get("web"), len(node.patches("web"))

    for number in (signal.SIGTERM, signal.SIGKILL):
        await node.stop_agent(number)
        await node.start_agent()
        await node.report("all pods", lambda report: report.is_synced)
    node.create("api")
    await node.run_pod("api")
    await node.ready("api")
    assert node.get("web") == before
    assert len(node.patches("web")) == patches


async def test_results_of_a_stopped_container_are_not_restored(node: Node) -> None:
    await node.start_agent()
    node.create("web")
    sandbox = await node.driver.run_sandbox("web")
    container = await node.driver.start_container(sandbox)
    await node.ready("web")

    await node.stop_agent()
    await node.driver.stop_container(container)
    await node.driver.start_container(sandbox, attempt=1, command=ASLEEP)
    await node.start_agent()
    await node.until("its failure", lambda: not node.is_ready("web"))
    statuses = [
        one["status"]
        for patch in node.patches("web")[-1:]
        for one in patch.body["status"]["conditions"]
        if one["type"] == labels.PROBES_PASSING
    ]
    assert statuses == ["False"]


async def test_agent_without_the_api_continues_from_the_saved_state(
    node: Node,
) -> None:
    """And writes what changed when it returns, once for each pod."""
    node.label_namespace({labels.MODE_LABEL: "audit"})
    await node.start_agent()
    sandboxes, containers = {}, {}
    for name in ("well", "ill"):
        node.create(name)
        sandboxes[name] = await node.driver.run_sandbox(name)
        containers[name] = await node.driver.start_container(sandboxes[name])
    await node.ready("well", "ill")
    await node.saved("well", "ill")
    patches = {name: len(node.patches(name)) for name in sandboxes}

    await node.stop_api()
    await node.stop_agent(signal.SIGKILL)
    await node.start_agent()
    # The mode is its namespace's, its probes are the spec's: only the API has either.
    await node.report("its pods", lambda report: reason_of(report, "ill") == "Audit")
    await node.report("its probes", has_probe_reason("ill", "ProbesPassing"))
    await node.driver.stop_container(containers["ill"])
    seen = await node.report("the illness", has_probe_reason("ill", "ContainerNotRunning"))
    assert any(
        problem.text.startswith("API server, pods: ") for problem in seen.pod_source.problems
    )
    await node.report("all pods", lambda report: report.is_synced)
    await node.serves("/readyz", 200)
    assert 'podgate_watch_healthy{resource="pods"} 0.0' in (await node.get_http("/metrics"))[1]
    await node.report(
        "one pod to be written", lambda report: report.pod_source.pending_conditions == 1
    )

    await node.start_api()
    await node.until("the news", lambda: not node.is_ready("ill"))
    seen = await node.report("no problem", lambda report: not report.pod_source.problems)
    assert len(node.patches("ill")) == patches["ill"] + 1
    assert len(node.patches("well")) == patches["well"]


async def test_pods_are_gated_with_the_runtime_alone(node: Node) -> None:
    """The API server is away for an agent's whole life, and nothing was saved."""
    await node.stop_api()
    await node.start_agent()
    sandbox = await node.run_pod("web")
    seen = await node.report("a gate", lambda report: reason_of(report, "web") == "Enforced")
    assert status_of(seen, "web").source == "runtime"
    code, text = await node.get_http("/readyz")
    assert code == 503
    assert text
    assert is_dropped(seen, "web")

    await node.stop_agent()
    await node.start_agent()
    seen = await node.report("the gate", lambda report: reason_of(report, "web") == "Enforced")
    node.create("web")
    await node.start_api()
    await node.ready("web")
    assert is_of(sandbox)(node.condition("web", labels.ISOLATION_READY))
    *waiting, _ = node.patches("web")
    assert len(waiting) <= 1


async def test_conditions_of_a_previous_boot_become_false_while_the_runtime_is_down(
    node: Node,
) -> None:
    """The pods' sandboxes are gone with the reboot, and the runtime is not up yet."""
    set_conditions_of_before(node)
    node.runtime.stop()
    await node.start_agent()
    await node.until("the correction", lambda: not node.is_ready("web"))
    assert node.condition("web", labels.ISOLATION_READY)["reason"] == "SandboxChanged"
    node.runtime.start()
    await node.run_pod("web", attempt=1)
    await node.ready("web")


async def test_pod_that_runs_when_the_agent_starts_after_a_reboot_is_gated_and_stays_ready(
    node: Node,
) -> None:
    set_conditions_of_before(node)
    sandbox = await node.run_pod("web", attempt=1)
    await node.start_agent()
    await node.until(
        "conditions of the new sandbox",
        lambda: is_of(sandbox)(node.condition("web", labels.PROBES_PASSING)),
    )
    written = [one for patch in node.patches("web") for one in patch.body["status"]["conditions"]]
    assert {one["status"] for one in written} == {"True"}
    report = await node.report("the gate", lambda report: status_of(report, "web").gates)
    assert reason_of(report, "web") == "Enforced"


def set_conditions_of_before(node: Node) -> None:
    """A pod is Ready, by conditions from before a reboot."""
    thing = node.create("web")
    thing["status"]["conditions"] = [
        {
            **{"type": kind, "status": "True", "reason": "Enforced"},
            "message": "All is well. (sandbox 0123456789ab, boot 00000000-before)",
        }
        for kind in (labels.ISOLATION_READY, labels.PROBES_PASSING)
    ]
    node.server.put(thing)


async def report(node: Node) -> AgentReport:
    return await node.report("an agent", lambda report: True)


def names_of(gates: list[GateStatus]) -> set[str]:
    return {gate.interface for gate in gates}


def is_of(sandbox: str) -> Callable[[Json], bool]:
    """Whether a condition speaks of this sandbox."""
    return lambda condition: f"(sandbox {sandbox[:12]}, " in condition.get("message", "")


def has_probe_reason(name: str, reason: str) -> Callable[[AgentReport], bool]:
    return lambda report: reason_of(report, name, labels.PROBES_PASSING) == reason


def is_dropped(report: AgentReport, name: str) -> bool:
    """Whether a process of the node cannot connect to the pod."""
    [address] = status_of(report, name).addresses
    return traffic.is_dropped(address, PORT)
