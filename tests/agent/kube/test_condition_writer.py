"""Conditions in the API: true, written once, and never of another pod."""

import asyncio
import datetime
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import structlog
from aiohttp import web

from agent import labels
from agent.kube.client import STRATEGIC_MERGE, ApiClient
from agent.kube.condition_writer import ConditionWriter
from agent.kube.objects import ApiPod
from agent.kube.watcher import Query, Watcher
from agent.logs import Event
from agent.pods.conditions import FALSE, TRUE, Conditions
from agent.pods.pod import Pod
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import PODS, ApiServer, Json, pod

pytestmark = pytest.mark.looptime

BOOT = "5be0b7e0-boot"
AT_ONCE = 8  # patches under way
NOW = datetime.datetime(2026, 11, 21, 8, 0, 0, 123456, tzinfo=datetime.UTC)


class Agent:
    """A writer, its watch of the API, and the agent's conditions."""

    def __init__(self, api: ApiClient, *, writes_all: bool = False) -> None:
        self.conditions = Conditions(now=lambda: NOW)
        self.sandboxes: dict[str, str] = {}
        self.withdrawn: set[str] = set()
        """Types of others."""
        self.writer = ConditionWriter(
            api,
            conditions_of=self.conditions.of,
            sandbox_of=lambda uid: self.sandboxes.get(uid, "sandbox-1"),
            boot=BOOT,
            writes_all=writes_all,
            is_withdrawn=lambda _, kind: kind in self.withdrawn,
            jitter=lambda: 0.5,
        )
        self.watcher = Watcher(
            api, Query("pods", PODS, ApiPod), on_change=self._on_change, jitter=lambda: 0.5
        )

    def _on_change(self, old: ApiPod | None, new: ApiPod | None) -> None:
        if new:
            self.writer.set_pod(new)
        elif old:
            self.writer.forget(old.uid)

    def know(
        self,
        name: str,
        kind: str = labels.ISOLATION_READY,
        *,
        status: str = TRUE,
        reason: str = "Enforced",
        message: str = "All is well.",
    ) -> None:
        """Something is found out about a pod."""
        told = Pod(uid=f"uid-{name}", namespace="default", name=name)
        self.conditions.set(told, kind, status, reason, message)
        self.writer.enqueue(told.uid)

    @asynccontextmanager
    async def running(self, *, watches: bool = True) -> AsyncIterator["Agent"]:
        tasks = [asyncio.create_task(self.writer.run())]
        if watches:
            tasks.append(asyncio.create_task(self.watcher.run()))
        try:
            await asyncio.sleep(1)
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def gated(name: str, kind: str = labels.ISOLATION_READY, **metadata: Any) -> Json:
    """A pod with one readiness gate, so that its status decides."""
    made = pod(name, **metadata)
    made["spec"]["readinessGates"] = [{"conditionType": kind}]
    return made


def conditions(server: ApiServer, name: str) -> dict[str, dict[str, Any]]:
    return {one["type"]: one for one in server.get(name)["status"].get("conditions", [])}


def with_condition(thing: Any, **fields: Any) -> Any:
    one = {
        "type": labels.ISOLATION_READY,
        "status": TRUE,
        "reason": "Enforced",
        "message": f"All is well. (sandbox sandbox-1, boot {BOOT})",
        "lastTransitionTime": "2026-11-20T00:00:00Z",
        "observedGeneration": 1,
        **fields,
    }
    thing["status"]["conditions"] = [one]
    return thing


async def failing(request: web.Request) -> web.StreamResponse | None:
    return (
        apiserver.error_response(503, "ServiceUnavailable") if request.method == "PATCH" else None
    )


async def test_both_conditions_go_in_one_patch_that_is_held_to_the_uid(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(apiserver.gated("a", generation=3))
    agent = Agent(api)
    agent.know("a")
    agent.know("a", labels.PROBES_PASSING, status=FALSE, reason="ProbeFailing", message="No.")
    async with agent.running():
        await asyncio.sleep(5)
    (patch,) = server.patches()
    assert patch.path == "/api/v1/namespaces/default/pods/a/status"
    assert patch.headers["Content-Type"] == STRATEGIC_MERGE
    stamp = f"(sandbox sandbox-1, boot {BOOT})"
    assert patch.body == {
        "metadata": {"uid": "uid-a"},
        "status": {
            "conditions": [
                {
                    "type": "podgate.io/isolation-ready",
                    "status": "True",
                    "reason": "Enforced",
                    "message": f"All is well. {stamp}",
                    "lastTransitionTime": "2026-11-21T08:00:00Z",
                    "observedGeneration": 3,
                },
                {
                    "type": "podgate.io/probes-passing",
                    "status": "False",
                    "reason": "ProbeFailing",
                    "message": f"No. {stamp}",
                    "lastTransitionTime": "2026-11-21T08:00:00Z",
                    "observedGeneration": 3,
                },
            ]
        },
    }


async def test_isolation_is_one_patch_and_what_follows_until_all_is_true_another(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(apiserver.gated("a"))
    async with Agent(api).running() as agent:
        agent.know("a", status=FALSE, reason="SandboxMissing")
        await asyncio.sleep(0.5)
        assert server.patches() == []
        agent.know("a")
        await asyncio.sleep(0.1)
        assert conditions(server, "a")[labels.ISOLATION_READY]["status"] == TRUE
        agent.know("a", labels.PROBES_PASSING, status=FALSE, reason="ContainerNotRunning")
        await asyncio.sleep(0.5)
        agent.know("a", labels.PROBES_PASSING, status=FALSE, reason="ProbePending")
        await asyncio.sleep(0.5)
        assert len(server.patches()) == 1
        agent.know("a", labels.PROBES_PASSING, reason="ProbesPassing")
        await asyncio.sleep(0.1)
        assert len(server.patches()) == 2
        await asyncio.sleep(100)
    assert len(server.patches()) == 2


async def test_isolation_goes_before_the_probes_of_other_pods(
    server: ApiServer, api: ApiClient
) -> None:
    """The kubelet waits a second for a condition that comes after the containers."""
    for number in range(300):
        server.put(gated(f"probed-{number}", labels.PROBES_PASSING))
    for number in range(60):
        server.put(apiserver.gated(f"new-{number}"))
    async with Agent(api).running() as agent:
        for number in range(300):
            agent.know(f"probed-{number}", labels.PROBES_PASSING, reason="ProbesPassing")
        await asyncio.sleep(0)
        for number in range(60):
            agent.know(f"new-{number}")
        await asyncio.sleep(60)
    names = [patch.path.split("/")[-2] for patch in server.patches()]
    last = max(place for place, name in enumerate(names) if name.startswith("new-"))
    # Those that were sent before, at most eight at once.
    assert last <= 60 + 8


async def test_slow_start_reports_its_reason(server: ApiServer, api: ApiClient) -> None:
    server.put(apiserver.gated("a"))
    async with Agent(api).running() as agent:
        agent.know("a")
        agent.know("a", labels.PROBES_PASSING, status=FALSE, reason="ProbePending")
        await asyncio.sleep(5)
        assert conditions(server, "a")[labels.ISOLATION_READY]["status"] == TRUE
        assert conditions(server, "a")[labels.PROBES_PASSING]["reason"] == "ProbePending"
        agent.know("a", labels.PROBES_PASSING, reason="ProbesPassing")
        await asyncio.sleep(0.1)
        agent.know("a", labels.PROBES_PASSING, status=FALSE, reason="ProbeFailing")
        await asyncio.sleep(0.1)
        assert conditions(server, "a")[labels.PROBES_PASSING]["status"] == FALSE
    assert len(server.patches()) == 3


@pytest.mark.parametrize("reason", ["Strict", "Enforced"])
async def test_relay_that_is_back_within_seconds_costs_no_patch(
    server: ApiServer, api: ApiClient, reason: str
) -> None:
    """reason: "Enforced" falls back, "Strict" does not (--strict-without-fallback)."""
    server.put(gated("a"))
    agent = Agent(api)
    agent.know("a", reason="Strict")
    async with agent.running():
        for _ in range(5):
            await asyncio.sleep(100)
            agent.know("a", reason=reason, message="Strict unavailable: the relay ended.")
            await asyncio.sleep(7)
            agent.know("a", reason="Strict")
        assert len(server.patches()) == 1
        agent.know("a", reason=reason, message="Strict unavailable: the relay ended.")
        await asyncio.sleep(100)
        assert "the relay ended" in conditions(server, "a")[labels.ISOLATION_READY]["message"]


async def test_nothing_is_sent_at_rest(server: ApiServer, api: ApiClient) -> None:
    server.put(gated("a"))
    agent = Agent(api)
    agent.know("a")
    async with agent.running():
        for _ in range(100):
            await asyncio.sleep(60)
            agent.know("a")
            server.put(server.get("a"))
    assert len(server.patches()) == 1
    assert agent.writer.pending == 0


async def test_restarted_agent_writes_nothing_that_is_there(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(with_condition(gated("a")))
    agent = Agent(api)
    async with agent.running():
        agent.know("a")
        await asyncio.sleep(60)
    assert server.patches() == []


async def test_transition_time_moves_with_the_status_only(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(with_condition(gated("a"), reason="Audit"))
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(5)
        found = conditions(server, "a")[labels.ISOLATION_READY]
        assert found["reason"] == "Enforced"
        assert found["lastTransitionTime"] == "2026-11-20T00:00:00Z"
        agent.know("a", status=FALSE, reason="GateFailed")
        await asyncio.sleep(1)
        found = conditions(server, "a")[labels.ISOLATION_READY]
        assert found["lastTransitionTime"] == "2026-11-21T08:00:00Z"


async def test_pods_without_a_gate_are_left_alone(server: ApiServer, api: ApiClient) -> None:
    server.put(pod("a"))
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(1)
    assert server.patches() == []


async def test_pods_without_a_gate_are_written_with_the_option(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(pod("a"))
    async with Agent(api, writes_all=True).running() as agent:
        agent.know("a")
        await asyncio.sleep(5)
    assert len(server.patches()) == 1


async def test_conditions_of_others_stay(server: ApiServer, api: ApiClient) -> None:
    server.put(with_condition(gated("a"), type="Ready", message=""))
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(1)
    assert set(conditions(server, "a")) == {"Ready", labels.ISOLATION_READY}


@pytest.mark.parametrize("recording", ["patch-404", "patch-old-resourceversion", "patch-wrong-uid"])
async def test_replaced_pod_is_dropped_as_recorded(
    recording: str, server: ApiServer, api: ApiClient
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return apiserver.as_recorded(recording)

    server.faults.append(answer)
    thing = gated("gated")
    thing["metadata"]["resourceVersion"] = "5515"
    async with Agent(api).running(watches=False) as agent:
        agent.writer.set_pod(msgspec.convert(thing, ApiPod))
        agent.know("gated")
        await asyncio.sleep(1)
        assert len(server.patches()) == 1
        agent.know("gated", status=FALSE, reason="GateFailed")
        thing["metadata"]["resourceVersion"] = "5516"
        agent.writer.set_pod(msgspec.convert(thing, ApiPod))
        assert agent.writer.pending == 0
        assert agent.writer.problem == ""
        await asyncio.sleep(60)
    (patch,) = server.patches()
    assert patch.path == "/api/v1/namespaces/default/pods/gated/status"


async def test_pod_that_took_the_name_is_not_written_with_the_olds_condition(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(gated("a"))
    async with Agent(api).running() as agent:
        await server.watched()
        server.silently(lambda: server.put(gated("a", uid="another")))
        agent.know("a")
        await asyncio.sleep(5)
    assert len(server.patches()) == 1
    assert conditions(server, "a") == {}


async def test_mirror_pod_is_patched_by_its_own_uid(server: ApiServer, api: ApiClient) -> None:
    mirror = gated(
        "static", uid="api-uid", annotations={"kubernetes.io/config.mirror": "uid-static"}
    )
    server.put(mirror)
    async with Agent(api).running() as agent:
        agent.know("static")
        await asyncio.sleep(1)
    assert server.patches()[0].body["metadata"]["uid"] == "api-uid"
    assert conditions(server, "static")


async def test_foreign_hand_is_corrected(server: ApiServer, api: ApiClient) -> None:
    server.put(gated("a"))
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(1)
        server.put(with_condition(server.get("a"), status=FALSE, reason="Meddled"))
        await asyncio.sleep(1)
        assert conditions(server, "a")[labels.ISOLATION_READY]["status"] == TRUE
        server.put(pod("a") | {"spec": server.get("a")["spec"]})
        await asyncio.sleep(1)
        assert conditions(server, "a")[labels.ISOLATION_READY]["status"] == TRUE
    assert len(server.patches()) == 3


async def test_somebody_who_never_gives_up_costs_little(server: ApiServer, api: ApiClient) -> None:
    server.put(gated("a"))
    async with Agent(api).running() as agent:
        agent.know("a")
        for _ in range(600):
            await asyncio.sleep(1)
            server.put(with_condition(server.get("a"), status=FALSE, reason="Meddled"))
    assert 50 < len(server.patches()) < 80


async def test_flapping_probe_is_written_at_once_and_then_less_often(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(gated("a", labels.PROBES_PASSING))
    async with Agent(api).running() as agent:
        for number in range(601):
            status = FALSE if number % 2 else TRUE
            agent.know("a", labels.PROBES_PASSING, status=status, reason="Flapping")
            await asyncio.sleep(0.1)
            if number < 4:
                assert conditions(server, "a")[labels.PROBES_PASSING]["status"] == status
        await asyncio.sleep(20)
    assert conditions(server, "a")[labels.PROBES_PASSING]["status"] == TRUE
    assert len(server.patches()) < 15


async def test_text_alone_is_written_once_a_minute(server: ApiServer, api: ApiClient) -> None:
    server.put(gated("a"))
    async with Agent(api).running() as agent:
        for number in range(600):
            agent.know("a", status=FALSE, reason="GateFailed", message=f"Try {number}.")
            await asyncio.sleep(1)
        await asyncio.sleep(60)
    assert 9 <= len(server.patches()) <= 12
    assert conditions(server, "a")[labels.ISOLATION_READY]["message"].startswith("Try 599.")


WRITES = (Event.CONDITION_WRITES_FAILING, Event.CONDITION_WRITES_RESUMED)


@pytest.fixture
def logs() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


async def test_after_an_outage_each_changed_pod_costs_one_patch(
    server: ApiServer, api: ApiClient, logs: list[structlog.typing.EventDict]
) -> None:
    for number in range(30):
        server.put(gated(f"a{number}"))
    async with Agent(api).running() as agent:
        for number in range(30):
            agent.know(f"a{number}")
        await asyncio.sleep(5)
        before = len(server.patches())
        logs.clear()
        server.faults.append(failing)
        for turn in range(20):
            for number in range(10):
                agent.know(f"a{number}", status=(FALSE, TRUE)[turn % 2], reason=f"Turn{turn}")
            agent.know("a20", status=(FALSE, TRUE)[turn % 2])
            await asyncio.sleep(30)
        # The first eight at once, then one each half minute.
        assert len(server.patches()) - before < 8 + 25
        assert agent.writer.problem
        assert agent.writer.pending == 10
        server.faults.clear()
        before = len(server.patches())
        await asyncio.sleep(60)
        assert sorted(one.path for one in server.patches()[before:]) == [
            f"/api/v1/namespaces/default/pods/a{number}/status" for number in range(10)
        ]
        assert agent.writer.problem == ""
        assert conditions(server, "a3")[labels.ISOLATION_READY]["reason"] == "Turn19"
    events = [(one["event"], one.get("code")) for one in logs if one["event"] in WRITES]
    assert events == [(Event.CONDITION_WRITES_FAILING, 503), (Event.CONDITION_WRITES_RESUMED, None)]


async def test_too_many_requests_are_waited_for(server: ApiServer, api: ApiClient) -> None:
    async def busy(request: web.Request) -> web.StreamResponse | None:
        if request.method != "PATCH":
            return None
        server.faults.clear()
        return apiserver.error_response(429, "TooManyRequests", retry_after=45)

    server.put(gated("a"))
    server.faults.append(busy)
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(60)
    first, second = (one.at for one in server.patches())
    assert second - first >= 45
    assert agent.writer.patches_by_code == {"429": 1, "200": 1}


async def test_retry_after_of_hours_delays_conditions_for_a_minute_at_most(
    server: ApiServer, api: ApiClient
) -> None:
    async def busy(request: web.Request) -> web.StreamResponse | None:
        if request.method != "PATCH":
            return None
        server.faults.clear()
        return apiserver.error_response(429, "TooManyRequests", retry_after=86400)

    server.put(gated("a"))
    server.faults.append(busy)
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(90)
        assert conditions(server, "a")


def _failing_pods(
    server: ApiServer, names: tuple[str, ...], code: int, reason: str, *, seconds: float = 0.0
) -> None:
    """Each patch of these pods gets this error. seconds: after this time."""

    async def fail(request: web.Request) -> web.StreamResponse | None:
        if request.method != "PATCH" or request.path.split("/")[-2] not in names:
            return None
        await asyncio.sleep(seconds)
        return apiserver.error_response(code, reason)

    server.faults.append(fail)


# A pod near etcd's limit of 1.5 MiB; a webhook that cannot be reached; one that does not answer.
@pytest.mark.parametrize(
    ("code", "reason", "seconds"),
    [(500, "InternalError", 0.0), (503, "ServiceUnavailable", 0.0), (504, "Timeout", 100.0)],
)
@pytest.mark.parametrize("count", [1, 2, 40])
async def test_pods_that_the_api_server_fails_to_write_delay_no_other(
    server: ApiServer, api: ApiClient, code: int, reason: str, seconds: float, count: int
) -> None:
    bad = tuple(f"bad{number}" for number in range(count))
    for name in (*bad, "good"):
        server.put(gated(name, labels.PROBES_PASSING if name == "good" else labels.ISOLATION_READY))
    async with Agent(api).running() as agent:
        agent.know("good", labels.PROBES_PASSING, reason="Passing")
        await asyncio.sleep(5)
        _failing_pods(server, bad, code, reason, seconds=seconds)
        for name in bad:
            # The most urgent change, and so the first one.
            agent.know(name)
        await asyncio.sleep(200)
        for status in (FALSE, TRUE, FALSE, TRUE):
            agent.know("good", labels.PROBES_PASSING, status=status, reason="Probed")
            # A request without a response takes 10 s, and where all fail, one at a time tries.
            await asyncio.sleep(20 if seconds else 2)
            assert conditions(server, "good")[labels.PROBES_PASSING]["status"] == status
            await asyncio.sleep(100)
        assert not agent.writer.problem
        assert len(server.patches()) < 60 * count


async def test_pod_that_fails_first_lets_another_try(server: ApiServer, api: ApiClient) -> None:
    """No write has succeeded yet, so its failure may be the API server's."""
    for name in ("bad", "good"):
        server.put(gated(name))
    _failing_pods(server, ("bad",), 503, "ServiceUnavailable")
    async with Agent(api).running() as agent:
        agent.know("bad")
        await asyncio.sleep(0.5)
        agent.know("good")
        await asyncio.sleep(3)
        assert conditions(server, "good")


async def test_pod_is_written_within_a_minute_after_its_failures_end(
    server: ApiServer, api: ApiClient
) -> None:
    for name in ("bad", "good"):
        server.put(gated(name))
    _failing_pods(server, ("bad",), 500, "InternalError")
    async with Agent(api).running() as agent:
        agent.know("bad")
        agent.know("good")
        await asyncio.sleep(3600)
        server.faults.clear()
        await asyncio.sleep(60)
        assert conditions(server, "bad")


async def test_server_that_fails_every_pod_is_one_problem(
    server: ApiServer, api: ApiClient, logs: list[structlog.typing.EventDict]
) -> None:
    names = tuple(f"a{number}" for number in range(30))
    for name in names:
        server.put(gated(name))
    _failing_pods(server, names, 500, "InternalError")
    async with Agent(api).running() as agent:
        for name in names:
            agent.know(name)
        await asyncio.sleep(600)
        # Eight at once before anything is known, then one each half minute.
        assert len(server.patches()) < 8 + 30
        assert agent.writer.problem
    assert [one["event"] for one in logs if one["event"] in WRITES] == [
        Event.CONDITION_WRITES_FAILING
    ]


async def test_failure_of_a_pod_that_is_deleted_is_no_problem_of_later(
    server: ApiServer, api: ApiClient
) -> None:
    """Nothing is to be written, so no success would end it."""
    server.put(gated("a"))
    agent = Agent(api)
    async with agent.running():
        server.faults.append(failing)
        agent.know("a")
        await asyncio.sleep(0.5)
        assert agent.writer.problem
        server.delete("a")
        await asyncio.sleep(0.5)
        assert agent.writer.problem == ""
        server.faults.clear()
        server.put(gated("b"))
        agent.know("b")
        await asyncio.sleep(5)
    assert conditions(server, "b")[labels.ISOLATION_READY]["status"] == TRUE


async def test_failures_of_pods_that_are_deleted_do_not_count_for_the_server(
    server: ApiServer, api: ApiClient
) -> None:
    _failing_pods(server, ("a", "b", "c"), 500, "InternalError")
    async with Agent(api).running() as agent:
        for name in ("a", "b", "c"):
            server.put(gated(name))
            agent.know(name)
            await asyncio.sleep(1)
            assert agent.writer.pending == 1
            assert agent.writer.problem == ""
            server.delete(name)
            await asyncio.sleep(0.5)


async def test_change_is_pending_until_the_api_server_has_it(
    server: ApiServer, api: ApiClient
) -> None:
    is_held = asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse | None:
        if request.method == "PATCH":
            await is_held.wait()
        return None

    for number in range(10):
        server.put(gated(f"a{number}"))
    server.faults.append(hold)
    async with Agent(api).running() as agent:
        for number in range(10):
            agent.know(f"a{number}")
        await asyncio.sleep(5)
        assert (len(server.patches()), agent.writer.pending) == (AT_ONCE, 10)
        is_held.set()
        await asyncio.sleep(1)
        assert (len(server.patches()), agent.writer.pending) == (10, 0)


async def test_change_that_is_taken_back_in_time_is_not_pending(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(gated("a"))
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(5)
        agent.know("a", message="Not for long.")
        await asyncio.sleep(10)
        assert (agent.writer.pending, round(agent.writer.oldest_pending_seconds)) == (1, 10)
        agent.know("a")
        assert (agent.writer.pending, agent.writer.oldest_pending_seconds) == (0, 0.0)
        await asyncio.sleep(100)
    assert len(server.patches()) == 1


async def test_condition_of_another_owner_is_removed_once_it_is_withdrawn(
    server: ApiServer, api: ApiClient
) -> None:
    other = "example.com/warm"
    server.put(with_condition(pod("a"), type=other))
    async with Agent(api).running() as agent:
        await asyncio.sleep(60)
        assert server.patches() == []
        agent.withdrawn.add(other)
        agent.writer.enqueue("uid-a")
        await asyncio.sleep(5)
        assert conditions(server, "a") == {}
    assert len(server.patches()) == 1


async def test_failures_of_the_same_moment_are_one(server: ApiServer, api: ApiClient) -> None:
    async def hiccup(request: web.Request) -> web.StreamResponse | None:
        return await failing(request) if len(server.patches()) <= 8 else None

    for number in range(20):
        server.put(gated(f"a{number}"))
    server.faults.append(hiccup)
    async with Agent(api).running() as agent:
        for number in range(20):
            agent.know(f"a{number}")
        await asyncio.sleep(3)
        assert agent.writer.pending == 0
    assert len(server.patches()) == 28


async def test_late_watch_event_is_not_corrected(server: ApiServer, api: ApiClient) -> None:
    late = msgspec.convert(server.put(gated("a")), ApiPod)
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(1)
        agent.writer.set_pod(late)
        await asyncio.sleep(60)
    assert len(server.patches()) == 1


async def test_rejection_of_one_pod_delays_no_other(server: ApiServer, api: ApiClient) -> None:
    async def forbid(request: web.Request) -> web.StreamResponse | None:
        is_meant = request.method == "PATCH" and "/a/" in request.path
        return apiserver.error_response(403, "Forbidden") if is_meant else None

    server.put(gated("a"))
    server.put(gated("b"))
    server.faults.append(forbid)
    with structlog.testing.capture_logs() as lines:
        async with Agent(api).running() as agent:
            agent.know("a")
            await asyncio.sleep(1)
            agent.know("b")
            await asyncio.sleep(1)
            assert conditions(server, "b")
            await asyncio.sleep(3600)
            assert 2 < len([one for one in server.patches() if "/a/" in one.path]) < 20
    rejected = [line for line in lines if line["event"] is Event.CONDITION_WRITE_REJECTED]
    assert [line["pod"] for line in rejected] == ["default/a"], "the same error is logged once"


async def test_pod_whose_write_succeeded_is_retried_soon_after_its_next_rejection(
    server: ApiServer, api: ApiClient
) -> None:
    async def forbid(request: web.Request) -> web.StreamResponse | None:
        is_patch = request.method == "PATCH"
        return apiserver.error_response(403, "Forbidden") if is_patch else None

    server.put(gated("a"))
    server.faults.append(forbid)
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(3600)
        server.faults.remove(forbid)
        await asyncio.sleep(600)
        assert conditions(server, "a")
        server.faults.append(forbid)
        before = len(server.patches())
        agent.know("a", status=FALSE, reason="GateFailed")
        await asyncio.sleep(30)
        assert len(server.patches()) - before >= 2


async def test_requests_without_a_response_are_retried(server: ApiServer, api: ApiClient) -> None:
    async def hang(request: web.Request) -> web.StreamResponse | None:
        if request.method == "PATCH" and len(server.patches()) == 1:
            await asyncio.sleep(100_000)
        return None

    server.put(gated("a"))
    server.faults.append(hang)
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(30)
        assert conditions(server, "a")
    assert len(server.patches()) == 2
    assert agent.writer.patches_by_code == {"none": 1, "200": 1}


async def test_response_that_is_cut_off_is_logged_and_the_patch_sent_again(
    server: ApiServer, api: ApiClient
) -> None:
    async def cut_off(request: web.Request) -> web.StreamResponse | None:
        if request.method == "PATCH" and len(server.patches()) == 1:
            return web.Response(text='{"kind": "Pod", "metadata"', content_type="application/json")
        return None

    server.put(gated("a"))
    server.faults.append(cut_off)
    with structlog.testing.capture_logs() as lines:
        async with Agent(api).running() as agent:
            agent.know("a")
            await asyncio.sleep(1)
            assert not conditions(server, "a")
            await asyncio.sleep(30)
            assert conditions(server, "a")
    invalid = [line["pod"] for line in lines if line["event"] is Event.PATCH_RESPONSE_INVALID]
    assert (invalid, len(server.patches())) == (["default/a"], 2)


async def test_patches_without_a_response_are_few_at_once(
    server: ApiServer, api: ApiClient
) -> None:
    """Eight of all pods, and two of those that fail while others do not."""
    bad = tuple(f"bad{number}" for number in range(12))
    for name in (*bad, "good"):
        server.put(gated(name))
    async with Agent(api).running() as agent:
        _failing_pods(server, bad, 504, "Timeout", seconds=100.0)
        for name in bad:
            agent.know(name)
        await asyncio.sleep(5)
        assert len(server.patches()) == AT_ONCE
        await asyncio.sleep(60)
        agent.know("good")
        await asyncio.sleep(120)
        assert conditions(server, "good")
        before = len(server.patches())
        await asyncio.sleep(100)
        # A request without a response takes ten seconds.
        assert len(server.patches()) - before <= 2 * 10 + 2


OF_BEFORE = "Fine. (sandbox sandbox-1, boot before)"


async def test_condition_of_a_previous_boot_becomes_false_if_the_pod_is_not_gated_soon(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(with_condition(gated("a"), message=OF_BEFORE))
    server.put(with_condition(gated("b")))
    async with Agent(api).running() as agent:
        assert server.patches() == []
        await asyncio.sleep(1.5)
        (patch,) = server.patches()
        found = conditions(server, "a")[labels.ISOLATION_READY]
        assert (found["status"], found["reason"]) == (FALSE, "SandboxChanged")
        agent.know("a")
        await asyncio.sleep(1)
        assert conditions(server, "a")[labels.ISOLATION_READY]["status"] == TRUE
    assert "/a/" in patch.path
    assert len(server.patches()) == 2


async def test_condition_of_a_previous_boot_is_never_false_if_the_pod_is_gated_soon(
    server: ApiServer, api: ApiClient
) -> None:
    """The kubelet would make the pod unready a second later, when its gate is attached."""
    server.put(with_condition(apiserver.gated("a"), message=OF_BEFORE))
    async with Agent(api).running() as agent:
        agent.know("a", status=FALSE, reason="NoInterface")
        agent.know("a", labels.PROBES_PASSING, status=FALSE, reason="ProbePending")
        await asyncio.sleep(0.5)
        assert server.patches() == []
        agent.know("a")
        agent.know("a", labels.PROBES_PASSING, reason="ProbesPassing")
        await asyncio.sleep(5)
    (patch,) = server.patches()
    assert [one["status"] for one in patch.body["status"]["conditions"]] == [TRUE, TRUE]
    assert patch.body["status"]["conditions"][0]["message"].endswith(f"boot {BOOT})")


async def test_pod_that_waits_for_it_has_no_condition_of_a_previous_boot_any_more(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(with_condition(apiserver.gated("a"), message=OF_BEFORE))
    async with Agent(api).running() as agent:
        agent.know("a")
        agent.know("a", labels.PROBES_PASSING, status=FALSE, reason="ContainerNotRunning")
        before = asyncio.get_running_loop().time()
        await agent.writer.correct("uid-a")
        assert asyncio.get_running_loop().time() - before < 0.1
        found = conditions(server, "a")
        assert len(server.patches()) == 1
        # The next sandbox gets the time to become gated.
        agent.sandboxes["uid-a"] = "sandbox-2"
        agent.know("a", status=FALSE, reason="NoInterface")
        await asyncio.sleep(1)
        assert len(server.patches()) == 1
    assert found[labels.ISOLATION_READY]["message"].endswith(f"boot {BOOT})")
    assert found[labels.PROBES_PASSING]["status"] == FALSE


@pytest.mark.parametrize("name", ["a", "unknown"])
async def test_pod_without_a_condition_of_another_sandbox_waits_for_nothing(
    server: ApiServer, api: ApiClient, name: str
) -> None:
    server.put(with_condition(gated("a")))
    async with Agent(api).running() as agent:
        await agent.writer.correct(f"uid-{name}")
        assert server.patches() == []


@pytest.mark.parametrize("is_withdrawn", [False, True])
async def test_pod_waits_for_another_owners_condition_of_a_previous_boot_unless_it_is_withdrawn(
    server: ApiServer, api: ApiClient, *, is_withdrawn: bool
) -> None:
    other = "example.com/warm"
    server.put(with_condition(pod("a"), type=other, message=OF_BEFORE))
    async with Agent(api).running() as agent:
        if is_withdrawn:
            agent.withdrawn.add(other)
        else:
            agent.know("a", other)
        await agent.writer.correct("uid-a")
        found = conditions(server, "a")[other]["message"]
        assert found.endswith("boot before)" if is_withdrawn else f"boot {BOOT})")
        await asyncio.sleep(5)
        assert set(conditions(server, "a")) == (set() if is_withdrawn else {other})
    assert len(server.patches()) == 1


@pytest.mark.parametrize("is_silent", [False, True])
async def test_pod_that_is_deleted_meanwhile_waits_no_longer(
    server: ApiServer, api: ApiClient, *, is_silent: bool
) -> None:
    async def hang(request: web.Request) -> web.StreamResponse | None:
        if request.method == "PATCH":
            await asyncio.sleep(1000)
        return None

    server.put(with_condition(gated("a"), message=OF_BEFORE))
    server.faults.append(hang if is_silent else failing)
    async with Agent(api).running() as agent:
        waiting = asyncio.create_task(agent.writer.correct("uid-a"))
        await asyncio.sleep(1)
        assert not waiting.done()
        server.delete("a")
        async with asyncio.timeout(1):
            await waiting


async def test_condition_of_a_previous_boot_is_false_at_once_without_a_sandbox(
    server: ApiServer, api: ApiClient
) -> None:
    """Before containers start, the kubelet takes it at once."""
    server.put(with_condition(gated("a"), message=OF_BEFORE))
    async with Agent(api).running() as agent:
        agent.know("a", status=FALSE, reason="SandboxMissing")
        await asyncio.sleep(0.1)
        assert conditions(server, "a")[labels.ISOLATION_READY]["reason"] == "SandboxMissing"


async def test_new_sandbox_makes_the_old_ones_conditions_stale(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(with_condition(gated("a")))
    agent = Agent(api)
    agent.sandboxes["uid-a"] = ""
    async with agent.running():
        await asyncio.sleep(10)
        assert server.patches() == []
        agent.sandboxes["uid-a"] = "sandbox-2"
        agent.writer.enqueue("uid-a")
        await asyncio.sleep(2.5)
        assert conditions(server, "a")[labels.ISOLATION_READY]["reason"] == "SandboxChanged"


async def test_condition_of_the_next_sandbox_is_written_though_only_its_text_differs(
    server: ApiServer, api: ApiClient
) -> None:
    """Who reads the condition learns from its text that it is not of the sandbox that runs."""
    server.put(gated("a"))
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(5)
        before = conditions(server, "a")[labels.ISOLATION_READY]["message"]
        assert "(sandbox sandbox-1, " in before
        agent.sandboxes["uid-a"] = "sandbox-2"
        agent.know("a")
        await asyncio.sleep(2.5)
        found = conditions(server, "a")[labels.ISOLATION_READY]
    assert found["status"] == TRUE
    assert "(sandbox sandbox-2, " in found["message"]


async def test_stale_conditions_go_first(server: ApiServer, api: ApiClient) -> None:
    for number in range(150):
        server.put(apiserver.gated(f"a{number}"))
    for number in range(150, 200):
        stale = with_condition(
            apiserver.gated(f"a{number}"), message="Fine. (sandbox x, boot before)"
        )
        server.put(stale)
    agent = Agent(api)
    for number in range(200):
        agent.know(f"a{number}")
    async with agent.running():
        await asyncio.sleep(10)

    order = [int(one.path.split("/")[-2].removeprefix("a")) for one in server.patches()]
    assert sorted(order) == list(range(200))
    # Eight are under way at once, on connections of their own: when the first of the others
    # arrives, at most seven of these have not, however long they take.
    assert set(order[: 50 - 7]) <= set(range(150, 200))


async def test_many_at_once_keep_to_the_limit(server: ApiServer, api: ApiClient) -> None:
    for number in range(250):
        server.put(gated(f"a{number}"))
    async with Agent(api).running() as agent:
        started = asyncio.get_running_loop().time()
        for number in range(250):
            agent.know(f"a{number}")
        await asyncio.sleep(10)
    times = [one.at - started for one in server.patches()]
    assert len(times) == 250
    assert 2.5 <= times[-1] <= 4
    assert max(sum(start <= at < start + 1 for at in times) for start in times) <= 151


async def test_server_without_observed_generation_is_not_patched_forever(
    server: ApiServer, api: ApiClient
) -> None:
    async def drop(request: web.Request) -> web.StreamResponse | None:
        if request.method == "PATCH":
            patch = server.received[-1].body
            for one in patch["status"]["conditions"]:
                one.pop("observedGeneration", None)
            return server._patch(request, patch)
        return None

    server.put(gated("a"))
    server.faults.append(drop)
    async with Agent(api).running() as agent:
        agent.know("a")
        await asyncio.sleep(600)
    assert len(server.patches()) == 1


async def test_long_messages_are_clipped_and_keep_their_stamp(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(gated("a"))
    async with Agent(api).running() as agent:
        agent.know("a", message="x" * 100_000)
        await asyncio.sleep(1)
    message = conditions(server, "a")[labels.ISOLATION_READY]["message"]
    assert len(message) == 1024
    assert message.endswith(f"(sandbox sandbox-1, boot {BOOT})")
