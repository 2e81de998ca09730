"""A roll-out that does not continue at a node gets a condition of the new pod."""

import asyncio
import datetime
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import structlog.testing
from aiohttp import web

from agent.app.roll_out import FIRST_SECONDS, LONGEST_SECONDS, TYPE, RollOut
from agent.kube.client import STRATEGIC_MERGE, ApiClient
from agent.kube.objects import ApiPod, PodCondition
from agent.logs import Event
from tests.agent.kube.apiserver import ApiServer, error_response
from tests.agent.kube.conftest import api, kubeconfig, listening, server

__all__ = ["api", "kubeconfig", "listening", "server"]
pytestmark = pytest.mark.looptime

START = datetime.datetime(2026, 11, 26, 12, 0, 0, tzinfo=datetime.UTC)
READY = "2026-11-26T12:00:00Z"


def agent_pod(name: str, *, created: str, revision: str, **fields: Any) -> ApiPod:
    labels = {"app.kubernetes.io/name": "podgate", "controller-revision-hash": revision}
    condition = {"type": "Ready", "status": "True", "lastTransitionTime": READY}
    thing = {
        "metadata": {
            "name": name,
            "namespace": "podgate",
            "uid": f"uid-{name}",
            "creationTimestamp": created,
            "labels": labels,
            **fields,
        },
        "status": {"conditions": [condition]},
    }
    return msgspec.convert(thing, ApiPod)


OLD = agent_pod("old", created="2026-11-25T08:00:00Z", revision="1")
NEW = agent_pod("new", created="2026-11-26T11:59:00Z", revision="2")


@asynccontextmanager
async def running(api: ApiClient, pods: list[ApiPod]) -> AsyncIterator[None]:
    began = asyncio.get_running_loop().time()
    made = RollOut(
        api,
        lambda: pods,
        namespace="podgate",
        name="new",
        jitter=lambda: 0.5,
        now=lambda: START + datetime.timedelta(seconds=asyncio.get_running_loop().time() - began),
    )
    task = asyncio.create_task(made.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_condition_of_the_own_pod_is_written_once_it_is_ready_for_long_enough(
    server: ApiServer, api: ApiClient
) -> None:
    server.faults.append(accept)
    began = asyncio.get_running_loop().time()
    async with running(api, [OLD, NEW]):
        await asyncio.sleep(FIRST_SECONDS - 1)
        assert not server.patches()
        await asyncio.sleep(5)
    (patch,) = server.patches()
    assert patch.at - began <= FIRST_SECONDS + 3
    assert patch.path == "/api/v1/namespaces/podgate/pods/new/status"
    assert patch.headers["Content-Type"] == STRATEGIC_MERGE
    (condition,) = patch.body["status"]["conditions"]
    assert "previous pod old still runs" in condition.pop("message")
    written_at = START + datetime.timedelta(seconds=patch.at - began)
    assert patch.body == {
        "metadata": {"uid": "uid-new"},
        "status": {
            "conditions": [
                {
                    "type": "podgate.io/took-over",
                    "status": "True",
                    "reason": "PreviousPodRuns",
                    "lastTransitionTime": written_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
            ]
        },
    }


async def test_condition_that_is_there_keeps_its_transition_time(
    server: ApiServer, api: ApiClient
) -> None:
    server.faults.append(accept)
    before = PodCondition(type=TYPE, status="True", last_transition_time="2026-11-26T11:00:00Z")
    status = msgspec.structs.replace(NEW.status, conditions=(*NEW.status.conditions, before))
    async with running(api, [OLD, msgspec.structs.replace(NEW, status=status)]):
        await asyncio.sleep(FIRST_SECONDS + 5)
    (patch,) = server.patches()
    (condition,) = patch.body["status"]["conditions"]
    assert condition["lastTransitionTime"] == "2026-11-26T11:00:00Z"


DELETED = agent_pod(
    "old", created="2026-11-25T08:00:00Z", revision="1", deletionTimestamp="2026-11-26T12:00:31Z"
)
YOUNGER = agent_pod("younger", created="2026-11-26T12:00:05Z", revision="3")
OF_ANOTHER = msgspec.convert(
    {
        "metadata": {
            "name": "podgate-proxy-1",
            "namespace": "podgate",
            "creationTimestamp": "2026-11-25T08:00:00Z",
            "labels": {"app.kubernetes.io/name": "podgate-proxy", "controller-revision-hash": "9"},
        }
    },
    ApiPod,
)


ELSEWHERE = agent_pod("old", created="2026-11-25T08:00:00Z", revision="1", namespace="other")
SAME = agent_pod("old", created="2026-11-25T08:00:00Z", revision="2")
AS_OLD = agent_pod("old", created=NEW.metadata.creation_timestamp or "", revision="1")
UNDATED = agent_pod("old", created="", revision="1", creationTimestamp=None)
BARE = agent_pod(
    *("old",),
    created="2026-11-25T08:00:00Z",
    revision="",
    labels={"app.kubernetes.io/name": "podgate"},
)


@pytest.mark.parametrize(
    "other", [None, DELETED, YOUNGER, OF_ANOTHER, ELSEWHERE, SAME, AS_OLD, UNDATED, BARE]
)
async def test_nothing_is_written_without_a_previous_pod(
    server: ApiServer, api: ApiClient, other: ApiPod | None
) -> None:
    async with running(api, [*([other] if other else []), NEW]):
        await asyncio.sleep(3600)
    assert not server.patches()


async def test_nothing_is_written_before_the_pod_is_ready(
    server: ApiServer, api: ApiClient
) -> None:
    unready = msgspec.convert({"metadata": {"name": "new", "namespace": "podgate"}}, ApiPod)
    (ready,) = NEW.status.conditions
    pods = [OLD]
    async with running(api, pods):
        await asyncio.sleep(600)
        pods.append(unready)
        for changed in ({"status": "False"}, {"last_transition_time": None}):
            await asyncio.sleep(600)
            one = msgspec.structs.replace(ready, **changed)
            status = msgspec.structs.replace(NEW.status, conditions=(one,))
            pods[1] = msgspec.structs.replace(NEW, status=status)
        await asyncio.sleep(600)
        assert not server.patches()
        pods[1] = NEW
        await asyncio.sleep(600)
    assert server.patches()


async def test_time_starts_again_with_readiness(server: ApiServer, api: ApiClient) -> None:
    server.faults.append(accept)
    pods = [OLD, NEW]
    async with running(api, pods):
        await asyncio.sleep(30)
        (condition,) = NEW.status.conditions
        later = msgspec.structs.replace(condition, last_transition_time="2026-11-26T12:00:20Z")
        status = msgspec.structs.replace(NEW.status, conditions=(later,))
        pods[1] = msgspec.structs.replace(NEW, status=status)
        await asyncio.sleep(20 + FIRST_SECONDS - 30 - 1)
        assert not server.patches()
        await asyncio.sleep(5)
    assert len(server.patches()) == 1


async def accept(request: web.Request) -> web.StreamResponse | None:
    return web.json_response({}) if request.method == "PATCH" else None


async def test_roll_out_that_does_not_go_on_costs_few_writes_and_each_is_a_change(
    server: ApiServer, api: ApiClient
) -> None:
    server.faults.append(accept)
    began = asyncio.get_running_loop().time()
    async with running(api, [OLD, NEW]):
        await asyncio.sleep(3600)
    patches = server.patches()
    times = [round(patch.at - began) for patch in patches]
    assert times[:6] == [34, 66, 132, 264, 528, 828]
    assert {after - before for before, after in itertools.pairwise(times[4:])} == {LONGEST_SECONDS}
    texts = [patch.body["status"]["conditions"][0]["message"] for patch in patches]
    assert len(set(texts)) == len(texts)


async def test_write_that_failed_is_repeated_with_back_off(
    server: ApiServer, api: ApiClient
) -> None:
    is_failing = True

    async def fail(request: web.Request) -> web.StreamResponse | None:
        if is_failing:
            return error_response(503, "ServiceUnavailable")
        return await accept(request)

    server.faults.append(fail)
    with structlog.testing.capture_logs() as lines:
        async with running(api, [OLD, NEW]):
            await asyncio.sleep(600)
            assert 5 <= len(server.patches()) <= 20
            assert [line["event"] for line in lines] == [Event.ROLL_OUT_NOT_REMINDED]
            is_failing = False
            await asyncio.sleep(120)
            is_failing = True
            await asyncio.sleep(LONGEST_SECONDS * 2)
    events = [line["event"] for line in lines]
    assert events[1] == Event.ROLL_OUT_REMINDED
    assert events.count(Event.ROLL_OUT_NOT_REMINDED) == 2
