"""Events about pods: few, and not those that the kubelet reports."""

import asyncio
import datetime
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import structlog.testing
from aiohttp import web

from agent.kube.client import MERGE, ApiClient
from agent.kube.events import EventRecorder
from agent.kube.objects import ApiPod
from agent.logs import Event
from agent.pods.events import kubelet_reports
from probes.spec.specs import parse_pod
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import ApiServer, RecordedRequest, pod

pytestmark = pytest.mark.looptime

PATH = "/apis/events.k8s.io/v1/namespaces/default/events"


def seen(name: str, **metadata: Any) -> ApiPod:
    return msgspec.convert(pod(name, **metadata), ApiPod)


@asynccontextmanager
async def running(api: ApiClient, *, node_name: str = "node1") -> AsyncIterator[EventRecorder]:
    def now() -> datetime.datetime:
        start = datetime.datetime(2026, 11, 21, 8, 0, 0, 5, tzinfo=datetime.UTC)
        return start + datetime.timedelta(seconds=asyncio.get_running_loop().time())

    made = EventRecorder(api, node_name=node_name, now=now, jitter=lambda: 0.5)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def created(server: ApiServer) -> list[RecordedRequest]:
    return server.of(PATH, method="POST")


def record(made: EventRecorder, name: str = "a", *, reason: str = "GateLost", **more: Any) -> None:
    made.record(seen(name), reason, "The gate was put back.", action="Guarding", **more)


async def test_event_about_a_namespace_is_listed_with_those_of_its_pods(
    server: ApiServer, api: ApiClient
) -> None:
    async with running(api) as made:
        for note in ("One label.", "One label.", "Another label."):
            made.record_namespace("shop", "LabelIgnored", note, action="Checking")
        await asyncio.sleep(300)
    first, second = server.of("/apis/events.k8s.io/v1/namespaces/shop/events", method="POST")
    assert first.body["metadata"]["namespace"] == "shop"
    assert first.body["regarding"]["kind"] == "Namespace"
    assert [one.body["note"] for one in (first, second)] == ["One label.", "Another label."]


async def test_event_about_the_node_is_where_kubectl_describe_finds_it(
    server: ApiServer, api: ApiClient
) -> None:
    async with running(api) as made:
        for _ in range(3):
            made.record_node("DeclaredPortsOpen", "Ports are open.", action="Gating")
            await asyncio.sleep(300)
    (event,) = created(server)
    assert event.body["metadata"]["namespace"] == "default"
    assert event.body["metadata"]["name"].startswith("node1.")
    # As of the kubelet's Events: its name for the UID, and no namespace.
    expected = {"apiVersion": "v1", "kind": "Node", "name": "node1", "uid": "node1"}
    assert event.body["regarding"] == expected
    assert (event.body["reason"], event.body["note"]) == ("DeclaredPortsOpen", "Ports are open.")
    counted = server.of(f"{PATH}/{event.body['metadata']['name']}", method="PATCH")
    assert counted[-1].body["series"]["count"] == 3


async def test_event_has_all_required_fields(server: ApiServer, api: ApiClient) -> None:
    async with running(api) as made:
        record(made, container="app")
        await asyncio.sleep(1)
    (asked,) = created(server)
    assert asked.body["metadata"].pop("name").startswith("a.")
    # metav1.MicroTime
    assert re.fullmatch(r"2026-11-21T08:00:00\.\d{6}Z", asked.body.pop("eventTime"))
    assert asked.body == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": "default"},
        "reportingController": "podgate.io/agent",
        "reportingInstance": "node1",
        "action": "Guarding",
        "reason": "GateLost",
        "regarding": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": "default",
            "name": "a",
            "uid": "uid-a",
            "fieldPath": "spec.containers{app}",
        },
        "note": "The gate was put back.",
        "type": "Warning",
    }


async def test_what_happens_again_is_a_series(server: ApiServer, api: ApiClient) -> None:
    async with running(api) as made:
        for _ in range(400):
            record(made)
            await asyncio.sleep(1)
        assert len(created(server)) == 1
        (patch,) = server.patches()
        assert patch.path == f"{PATH}/{created(server)[0].body['metadata']['name']}"
        assert patch.headers["Content-Type"] == MERGE
        count = patch.body["series"]["count"]
        assert 300 <= count <= 331
        assert patch.body["series"]["lastObservedTime"].startswith("2026-11-21T08:05:")
        await asyncio.sleep(600)
        assert [one.body["series"]["count"] for one in server.patches()] == [count, 400]
        record(made)
        await asyncio.sleep(1)
        assert len(created(server)) == 2


async def test_change_that_was_requested_is_no_warning(server: ApiServer, api: ApiClient) -> None:
    async with running(api) as made:
        record(made, reason="ContainerProbeChanged", is_warning=False)
        record(made)
        await asyncio.sleep(30)
    assert [event.body["type"] for event in created(server)] == ["Normal", "Warning"]


async def test_different_things_are_different_events(server: ApiServer, api: ApiClient) -> None:
    async with running(api) as made:
        for name in ("a", "b"):
            for reason in ("GateLost", "Unhealthy"):
                for container in ("", "app"):
                    record(made, name, reason=reason, container=container)
        await asyncio.sleep(5)
        for namespace in ("shop", "bank"):
            made.record(seen("a", namespace=namespace, uid=namespace), "A", "B.", action="C")
            made.record_namespace(namespace, "A", "B.", action="C")
        await asyncio.sleep(5)
    assert len({one.body["metadata"]["name"] for one in created(server)}) == 8
    for namespace in ("shop", "bank"):
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        kinds = [one.body["regarding"]["kind"] for one in server.of(path, method="POST")]
        assert kinds == ["Pod", "Namespace"]


async def test_series_that_outlives_its_event_starts_again(
    server: ApiServer, api: ApiClient
) -> None:
    async def forget(request: web.Request) -> web.StreamResponse | None:
        if request.method != "PATCH":
            return None
        return apiserver.error_response(404, "NotFound")

    server.faults.append(forget)
    async with running(api) as made:
        for _ in range(400):
            record(made)
            await asyncio.sleep(1)
    assert len(created(server)) == 2
    assert created(server)[1].body["series"]["count"] > 300


async def test_storm_of_events_is_limited(server: ApiServer, api: ApiClient) -> None:
    async with running(api) as made:
        for number in range(3000):
            record(made, f"a{number}")
        await asyncio.sleep(60)
        assert len(created(server)) <= 351
        assert made.dropped == 2000


async def test_outage_costs_little_and_the_newest_are_sent_after_it(
    server: ApiServer, api: ApiClient
) -> None:
    async def fail(request: web.Request) -> web.StreamResponse | None:
        return apiserver.error_response(503, "ServiceUnavailable")

    server.faults.append(fail)
    async with running(api) as made:
        for number in range(50):
            record(made, f"a{number}")
        await asyncio.sleep(120)
        assert len(created(server)) < 10
        server.faults.clear()
        await asyncio.sleep(120)
        sent = {one.body["regarding"]["name"] for one in created(server)}
        assert "a49" in sent
        assert made.dropped == 0


async def test_event_is_tried_five_times_and_the_first_again_soon(
    server: ApiServer, api: ApiClient
) -> None:
    async def fail(request: web.Request) -> web.StreamResponse | None:
        return apiserver.error_response(503, "ServiceUnavailable")

    async with running(api) as made:
        for name in ("a", "b"):
            server.faults.append(fail)
            record(made, name)
            await asyncio.sleep(300)
            server.faults.clear()
            record(made, f"{name}-later")
            await asyncio.sleep(60)
        assert (made.dropped, made.sent) == (2, 2)
    for name in ("a", "b"):
        tries = [one.at for one in created(server) if one.body["regarding"]["name"] == name]
        assert [round(tried - tries[0]) for tried in tries] == [0, 1, 3, 7, 15]


async def test_each_outage_is_logged_once(server: ApiServer, api: ApiClient) -> None:
    async def fail(request: web.Request) -> web.StreamResponse | None:
        return apiserver.error_response(503, "ServiceUnavailable")

    counts = []
    async with running(api) as made:
        with structlog.testing.capture_logs() as logs:
            for number, is_away in enumerate((True, False, True)):
                server.faults[:] = [fail] if is_away else []
                for name in ("a", "b"):
                    record(made, f"{name}{number}")
                await asyncio.sleep(60)
                counts.append(sum(one["event"] is Event.EVENT_NOT_SENT for one in logs))
    assert counts == [1, 1, 2]


async def test_rejected_event_is_discarded(server: ApiServer, api: ApiClient) -> None:
    async def reject(request: web.Request) -> web.StreamResponse | None:
        body = server.received[-1].body
        is_meant = body["regarding"]["name"] == "a"
        return apiserver.error_response(403, "Forbidden") if is_meant else None

    server.faults.append(reject)
    async with running(api) as made:
        record(made, "a")
        record(made, "b")
        await asyncio.sleep(300)
        assert [one.body["regarding"]["name"] for one in created(server)] == ["a", "b"]
        assert made.dropped == 1


async def test_long_and_odd_texts_fit(server: ApiServer, api: ApiClient) -> None:
    async with running(api, node_name="n" * 250) as made:
        made.record(seen("x" * 253), "R" * 200, "ü" * 5000, action="Probing")
        await asyncio.sleep(1)
    body = created(server)[0].body
    assert len(body["note"].encode()) <= 1024
    assert len(body["metadata"]["name"]) <= 253
    assert len(body["reportingInstance"]) <= 128
    assert len(body["reason"]) <= 128


def test_failures_of_the_kubelets_probes_are_left_to_the_kubelet() -> None:
    own = (
        '{"apiVersion": "podgate.io/v2", "containers":'
        ' [{"name": "app", "readiness": {"tcp": {"port": 5}}}]}'
    )
    thing = pod("a", annotations={"podgate.io/probe-spec": own})
    thing["spec"]["containers"][0] |= {
        "readinessProbe": {"tcpSocket": {"port": 80}},
        "startupProbe": {"tcpSocket": {"port": 80}},
    }
    spec = parse_pod(thing)
    assert kubelet_reports(spec, "app", "startup")
    assert not kubelet_reports(spec, "app", "readiness")
    assert not kubelet_reports(spec, "app", "liveness")
    assert not kubelet_reports(spec, "nobody", "readiness")
