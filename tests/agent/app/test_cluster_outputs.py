"""What an agent of a cluster writes to the API server, and reads there of its own conditions."""

import asyncio
import datetime
import pathlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
import pytest
import structlog.testing
from aiohttp import web

from agent import labels
from agent.admin.report import SourceProblem
from agent.app import cluster_outputs
from agent.app.cluster_outputs import ClusterOutputs
from agent.cri.models import CriContainer, CriContainerState, Sandbox
from agent.gates.metrics import GateMetrics
from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod, PodCondition
from agent.kube.pod_reports import API
from agent.logs import Event
from agent.pods.conditions import TRUE, Conditions
from agent.pods.events import PodEvent, PodEvents
from agent.pods.pod import Pod
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.policy.api_source import ApiPolicies
from agent.settings import Settings
from agent.sources.cluster import ClusterSource
from bpf.verdicts import Mode
from tests.agent.kube.apiserver import ApiServer, gated, pod

pytestmark = pytest.mark.looptime

BOOT = "5be0b7e0-boot"
CREATED = datetime.datetime(2026, 11, 28, 8, 0, 0, tzinfo=datetime.UTC)
WEB = Pod(uid="uid-web", namespace="default", name="web")


def after(seconds: float) -> datetime.datetime:
    return CREATED + datetime.timedelta(seconds=seconds)


class Agent:
    """Its outputs; the test has the part of its source."""

    def __init__(
        self, server: ApiServer, api: ApiClient, directory: pathlib.Path, *restored: dict[str, Any]
    ) -> None:
        """restored: pods that a previous agent saved."""
        self.server = server
        self.conditions = Conditions()
        self.store, self.events = PodStore(self.conditions), PodEvents()
        self.metrics = GateMetrics(self.store)
        settings = Settings(
            node_name="node1", run_directory=directory, cri_socket=directory / "no-runtime.sock"
        )
        policies = ApiPolicies(api, state=directory / "policies.json")
        modes = PodModes(Mode.AUDIT)
        self.source = ClusterSource(api, settings, self.store, policies, modes)
        for thing in restored:
            self.source.pods.set_pod(API, msgspec.convert(server.put(thing), ApiPod))
        self.outputs = ClusterOutputs(
            api, settings, self.store, self.source, self.events, self.metrics
        )

    def add(self, thing: dict[str, Any]) -> None:
        """A pod of the node, as the API server has it."""
        put = self.server.put(thing)
        self.source.pods.set_pod(API, msgspec.convert(put, ApiPod))
        self.source.changes.mark(put["metadata"]["uid"])

    def start(
        self,
        sandbox: str = "sandbox-1",
        *,
        created: datetime.datetime | None = CREATED,
        containers: Iterable[CriContainerState] = (),
    ) -> None:
        """A sandbox of the pod, with containers in these states."""
        self.source.sandboxes.current[WEB.uid] = Sandbox(
            id=sandbox,
            pod_uid=WEB.uid,
            pod_name="web",
            pod_namespace="default",
            attempt=0,
            created=created,
            is_ready=True,
        )
        self.source.sandboxes.containers[WEB.uid] = tuple(
            CriContainer(
                id=f"{sandbox}-{state.value}",
                sandbox_id=sandbox,
                name=state.value,
                attempt=0,
                state=state,
                created=created,
            )
            for state in containers
        )

    def gate(self, at: datetime.datetime | None) -> None:
        """The reconciler has attached the sandbox's first gate then."""
        if WEB.uid not in self.store.pods:
            self.store.set_pod(WEB)
        self.store.pods[WEB.uid].first_gated_at = at
        self.store.in_force.mark(WEB.uid)

    def ungated(self) -> list[float]:
        """Number and sum of the durations without a gate."""
        (metric,) = self.metrics.ungated_seconds.collect()
        found = {one.name.rpartition("_")[2]: one.value for one in metric.samples}
        return [found["count"], found["sum"]]

    def patched(self) -> list[tuple[str, str, str]]:
        """Type, status and message of each condition that was written."""
        return [
            (one["type"], one["status"], one["message"])
            for patch in self.server.patches()
            for one in patch.body["status"]["conditions"]
        ]


@pytest.fixture
async def agent(
    server: ApiServer, api: ApiClient, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Agent]:
    monkeypatch.setattr(cluster_outputs, "boot_id", lambda: BOOT)
    made = Agent(server, api, tmp_path, gated("restored"))
    running = asyncio.create_task(made.outputs.run())
    await asyncio.sleep(0.1)
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_time_without_a_gate_is_measured_once_for_each_sandbox(agent: Agent) -> None:
    agent.start()
    with structlog.testing.capture_logs() as lines:
        for at in (None, after(0.5), after(0.5)):
            agent.gate(at)
            await asyncio.sleep(0.1)
        assert agent.ungated() == [1, 0.5]
        # The gate was attached by the clock of the agent, which may be behind the runtime's.
        agent.start("sandbox-2")
        agent.gate(after(-1))
        await asyncio.sleep(0.1)
        assert agent.ungated() == [2, 0.5]
        agent.start("sandbox-3", created=None)
        agent.gate(after(2))
        await asyncio.sleep(0.1)
        del agent.source.sandboxes.current[WEB.uid]
        agent.gate(after(3))
        await asyncio.sleep(0.1)
    assert agent.ungated() == [2, 0.5]
    first = [line for line in lines if line["event"] is Event.FIRST_GATE]
    assert [(one["sandbox"], one["ungated_seconds"], one["containers"]) for one in first] == [
        ("sandbox-1", 0.5, []),
        ("sandbox-2", 0.0, []),
    ]
    assert {(one["pod"], one["log_level"]) for one in first} == {("default/web", "info")}


async def test_pod_that_is_added_again_is_measured_again(agent: Agent) -> None:
    agent.start()
    agent.gate(after(1))
    await asyncio.sleep(0.1)
    agent.store.remove_pod(WEB.uid)
    agent.store.in_force.mark(WEB.uid)
    await asyncio.sleep(0.1)
    agent.gate(after(1))
    await asyncio.sleep(0.1)
    assert agent.ungated() == [2, 2]


async def test_containers_that_started_before_the_gate_are_a_warning(agent: Agent) -> None:
    states = (CriContainerState.CREATED, CriContainerState.RUNNING, CriContainerState.EXITED)
    agent.start(containers=states)
    with structlog.testing.capture_logs() as lines:
        agent.gate(after(1.23456))
        await asyncio.sleep(0.1)
    (line,) = (one for one in lines if one["event"] is Event.CONTAINERS_STARTED_BEFORE_GATE)
    assert (line["log_level"], line["pod"], line["sandbox"]) == (
        *("warning", "default/web", "sandbox-1"),
    )
    assert (line["ungated_seconds"], line["containers"]) == (1.235, ["running", "exited"])


def isolated(agent: Agent) -> None:
    agent.conditions.set(WEB, labels.ISOLATION_READY, TRUE, "Enforced", "All is well.")


async def test_conditions_are_written_once_the_runtime_has_listed_its_sandboxes(
    agent: Agent,
) -> None:
    """A sandbox that is missing before means nothing."""
    agent.add(gated("web"))
    agent.start()
    isolated(agent)
    await asyncio.sleep(10)
    assert agent.patched() == []
    agent.source.sandboxes.listed.set()
    await asyncio.sleep(10)
    text = f"All is well. (sandbox sandbox-1, boot {BOOT})"
    assert agent.patched() == [(labels.ISOLATION_READY, TRUE, text)]
    assert agent.outputs.status().pending_conditions == 0


async def test_pod_that_was_restored_gets_its_conditions(agent: Agent) -> None:
    agent.source.sandboxes.listed.set()
    restored = Pod(uid="uid-restored", namespace="default", name="restored")
    agent.conditions.set(restored, labels.ISOLATION_READY, TRUE, "Enforced", "All is well.")
    await asyncio.sleep(10)
    assert [kind for kind, _, _ in agent.patched()] == [labels.ISOLATION_READY]


@pytest.mark.parametrize(
    ("is_deleting", "has_sandbox", "is_written"),
    [(True, False, False), (True, True, True), (False, False, True)],
)
async def test_pod_that_is_deleted_and_has_no_sandbox_keeps_its_conditions(
    agent: Agent, is_deleting: bool, has_sandbox: bool, is_written: bool
) -> None:
    times = {"deletionTimestamp": "2026-11-28T08:00:00Z"} if is_deleting else {}
    agent.add(gated("web", **times))
    if has_sandbox:
        agent.start()
    agent.source.sandboxes.listed.set()
    isolated(agent)
    await asyncio.sleep(10)
    assert len(agent.patched()) == is_written


async def test_api_server_that_rejects_conditions_is_a_problem_until_the_pod_ends(
    agent: Agent,
) -> None:
    async def fail(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=503) if request.method == "PATCH" else None

    agent.server.faults.append(fail)
    agent.source.sandboxes.listed.set()
    assert agent.outputs.api_problems == {}
    agent.add(gated("web"))
    agent.start()
    isolated(agent)
    await asyncio.sleep(30)
    problem = agent.outputs.api_problems["conditions"]
    status = agent.outputs.status()
    assert status.problems[0] == SourceProblem(
        part="conditions", text=f"API server, conditions: {problem}"
    )
    assert status.pods_from == "API server, node node1; 1 sandboxes"
    assert status.pending_conditions == 1
    assert status.pending_seconds > 20
    ended = gated("web")
    ended["status"]["phase"] = "Succeeded"
    agent.add(ended)
    await asyncio.sleep(10)
    assert agent.outputs.api_problems == {}
    assert agent.outputs.status().pending_conditions == 0
    tries = len(agent.server.patches())
    await asyncio.sleep(60)
    assert len(agent.server.patches()) == tries


def stamped(kind: str, *, status: str = TRUE, sandbox: str = "sandbox-1") -> dict[str, Any]:
    thing = pod("web")
    thing["status"]["conditions"] = [
        {
            "type": kind,
            "status": status,
            "reason": "Applied",
            "message": f"3 rules. (sandbox {sandbox}, boot {BOOT})",
            "lastTransitionTime": "2026-11-28T08:00:00Z",
        }
    ]
    return thing


@pytest.mark.parametrize(
    ("status", "sandbox", "is_current"),
    [(TRUE, "sandbox-1", True), ("False", "sandbox-1", False), (TRUE, "sandbox-0", False)],
)
async def test_conditions_in_the_api_count_if_they_are_true_of_the_current_sandbox(
    agent: Agent, status: str, sandbox: str, is_current: bool
) -> None:
    agent.start()
    found = agent.outputs
    assert (found.policy_ready(WEB.uid), found.passing_since(WEB.uid)) == (None, None)
    agent.add(stamped(labels.PROBES_PASSING, status=status, sandbox=sandbox))
    since = CREATED.timestamp() if is_current else None
    assert (found.policy_ready(WEB.uid), found.passing_since(WEB.uid)) == (None, since)
    agent.add(stamped(labels.POLICY_READY, status=status, sandbox=sandbox))
    ready = PodCondition(
        type=labels.POLICY_READY,
        status=TRUE,
        reason="Applied",
        message="3 rules.",
        last_transition_time="2026-11-28T08:00:00Z",
    )
    assert found.policy_ready(WEB.uid) == (ready if is_current else None)
    assert found.passing_since(WEB.uid) is None


async def test_events_are_about_pods_namespaces_and_the_node(agent: Agent) -> None:
    agent.add(pod("web"))
    for event in (
        PodEvent("uid-web", "GateLost", "The gate was put back.", "Guarding", is_warning=False),
        PodEvent("uid-web", "Failing", "It fails.", "Probing", container="app", about="x"),
        PodEvent("uid-gone", "GateLost", "The gate was put back.", "Guarding"),
        PodEvent(None, "NoTable", "There is no table.", "Blocking"),
        PodEvent(None, "BadLabel", "One label.", "Reading", namespace="shop"),
    ):
        agent.events.record(event)
    await asyncio.sleep(10)
    sent = [one.body for one in agent.server.received if one.path.endswith("/events")]
    fields = ("reason", "note", "action", "type")
    assert [tuple(one[field] for field in fields) for one in sent] == [
        ("GateLost", "The gate was put back.", "Guarding", "Normal"),
        ("Failing", "It fails.", "Probing", "Warning"),
        ("NoTable", "There is no table.", "Blocking", "Warning"),
        ("BadLabel", "One label.", "Reading", "Warning"),
    ]
    assert [(one["regarding"]["kind"], one["regarding"]["name"]) for one in sent] == [
        *(("Pod", "web"), ("Pod", "web"), ("Node", "node1"), ("Namespace", "shop")),
    ]
    assert "app" in sent[1]["regarding"]["fieldPath"]
