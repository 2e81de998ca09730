"""The node's report: written when it changes, and never often."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog.testing
from aiohttp import web

from agent.app.node_reporter import (
    COUNTS_SECONDS,
    PERIOD_SECONDS,
    SPREAD_SECONDS,
    NodeReporter,
)
from agent.kube.client import APPLY, ApiClient
from agent.kube.node_report import PATH, FailedPolicy, NodePolicies, NodeStatus, NodeSummary
from agent.logs import Event
from tests.agent.kube.apiserver import ApiServer, error_response
from tests.agent.kube.conftest import api, kubeconfig, listening, server

__all__ = ["api", "kubeconfig", "listening", "server"]
pytestmark = pytest.mark.looptime


class Node:
    """What the agent has in force."""

    def __init__(self) -> None:
        self.status: NodeStatus | None = _status("r1")
        self.uid = "uid-node1"


def _status(revision: str, *failed: FailedPolicy) -> NodeStatus:
    return NodeStatus("0.1.0", NodePolicies(revision, 2, failed))


@asynccontextmanager
async def running(api: ApiClient, node: Node, *, jitter: float = 0.5) -> AsyncIterator[None]:
    made = NodeReporter(
        api,
        "node1",
        status=lambda: node.status,
        node_uid=lambda: node.uid,
        jitter=lambda: jitter,
    )
    task = asyncio.create_task(made.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_report_is_applied_once_and_belongs_to_the_node(
    server: ApiServer, api: ApiClient
) -> None:
    async with running(api, Node()):
        await asyncio.sleep(3600)
    (request,) = server.patches()
    assert request.path == f"{PATH}/node1"
    assert request.headers["Content-Type"] == APPLY
    assert request.query == {"fieldManager": "podgate-agent", "force": "true"}
    owner = {"apiVersion": "v1", "kind": "Node", "name": "node1", "uid": "uid-node1"}
    assert request.body == {
        "apiVersion": "podgate.io/v1alpha1",
        "kind": "NodeReport",
        "metadata": {"name": "node1", "ownerReferences": [owner]},
        "status": {"agentVersion": "0.1.0", "policies": {"revision": "r1", "count": 2}},
    }


@pytest.mark.parametrize("jitter", [0.0, 0.999])
async def test_change_is_reported_within_the_spread(
    server: ApiServer, api: ApiClient, jitter: float
) -> None:
    node = Node()
    async with running(api, node, jitter=jitter):
        await asyncio.sleep(600)
        server.received.clear()
        changed_at = asyncio.get_running_loop().time()
        node.status = _status("r2", FailedPolicy("a", 1, "no room"))
        await asyncio.sleep(600)
    (request,) = server.patches()
    assert request.at - changed_at <= SPREAD_SECONDS + 1
    assert request.body["status"]["policies"]["failed"] == [
        {"name": "a", "generation": 1, "message": "no room"}
    ]


@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.9])
async def test_node_that_changes_all_the_time_writes_once_a_minute(
    server: ApiServer, api: ApiClient, jitter: float
) -> None:
    """On average over nodes: from half a minute to one and a half."""
    node = Node()
    async with running(api, node, jitter=jitter):
        for number in range(900):
            node.status = _status(f"r{number}")
            await asyncio.sleep(1)
    times = [one.at for one in server.patches()]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    pause = PERIOD_SECONDS * (0.5 + jitter) + SPREAD_SECONDS * jitter
    assert pauses == pytest.approx([pause] * len(pauses), abs=2)


async def test_nothing_is_reported_while_gates_are_behind_or_the_node_is_unknown(
    server: ApiServer, api: ApiClient
) -> None:
    node = Node()
    node.status, node.uid = None, ""
    async with running(api, node):
        await asyncio.sleep(600)
        node.status = _status("r1")
        await asyncio.sleep(600)
        assert not server.patches()
        node.uid = "uid-node1"
        await asyncio.sleep(60)
    assert len(server.patches()) == 1


@pytest.mark.parametrize(("code", "most"), [(404, 13), (403, 13), (503, 40)])
async def test_report_that_is_rejected_is_written_later(
    server: ApiServer, api: ApiClient, code: int, most: int
) -> None:
    is_failing = True

    async def fail(request: web.Request) -> web.StreamResponse | None:
        return error_response(code, "Failure") if is_failing else None

    server.faults.append(fail)
    node = Node()
    async with running(api, node):
        with structlog.testing.capture_logs() as lines:
            await asyncio.sleep(3600)
        assert 1 < len(server.patches()) <= most
        times = [one.at for one in server.patches()]
        least = 5 if code == 503 else 300
        assert min(after - before for before, after in itertools.pairwise(times)) >= least
        assert [line["event"] for line in lines] == [Event.NODE_REPORT_NOT_WRITTEN]
        is_failing = False
        await asyncio.sleep(600)
        count = len(server.patches())
        await asyncio.sleep(600)
    assert len(server.patches()) == count


def _counted(pods: int, in_force: int | None = None, problems: int = 0) -> NodeStatus:
    """With pods in enforce."""
    mine = pods if in_force is None else in_force
    summary = NodeSummary(
        has_kubelet=True,
        problems=problems,
        desired={"enforce": pods},
        in_force={"enforce": mine},
    )
    return NodeStatus("0.1.0", NodePolicies("r1", 2), summary)


async def test_pods_that_come_and_go_are_written_every_five_minutes(
    server: ApiServer, api: ApiClient
) -> None:
    node = Node()
    async with running(api, node):
        for number in range(3600):
            node.status = _counted(number)
            await asyncio.sleep(1)
    count = len(server.patches())
    assert 3600 / (COUNTS_SECONDS + SPREAD_SECONDS + 1) - 1 <= count <= 3600 / COUNTS_SECONDS + 1


@pytest.mark.parametrize("worse", [_counted(4, 3), _counted(4, problems=1)])
async def test_node_that_is_not_in_order_reports_it_within_the_spread(
    server: ApiServer, api: ApiClient, worse: NodeStatus
) -> None:
    node = Node()
    node.status = _counted(4)
    async with running(api, node):
        await asyncio.sleep(200)
        server.received.clear()
        changed_at = asyncio.get_running_loop().time()
        node.status = worse
        await asyncio.sleep(200)
    (request,) = server.patches()
    assert request.at - changed_at <= SPREAD_SECONDS + 1
    summary = request.body["status"]["summary"]
    assert (summary["inForce"]["enforce"], summary.get("problems", 0)) in {(3, 0), (4, 1)}


async def test_pod_that_starts_is_no_report(server: ApiServer, api: ApiClient) -> None:
    """Its gate is in force moments later."""
    node = Node()
    node.status = _counted(4)
    async with running(api, node):
        await asyncio.sleep(200)
        server.received.clear()
        node.status = _counted(5, 4)
        await asyncio.sleep(2)
        node.status = _counted(4)
        await asyncio.sleep(600)
    assert not server.patches()
