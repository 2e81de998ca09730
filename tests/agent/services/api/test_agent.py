"""In an agent of a cluster: results of its own probes reach clients of service endpoints."""

import asyncio
import pathlib
from collections.abc import AsyncIterator

import grpc
import msgspec
import pytest
from aiohttp import web

from agent import labels
from agent.app.cluster_outputs import ClusterOutputs
from agent.gates.metrics import GateMetrics
from agent.kube.client import ApiClient
from agent.kube.pod_reports import KUBELET
from agent.pods.conditions import FALSE, TRUE, Conditions
from agent.pods.events import PodEvents
from agent.pods.pod import Pod
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.policy.api_source import ApiPolicies
from agent.services.api.api_objects import SERVICES, SLICES
from agent.settings import ServiceSettings, Settings, localnet_socket
from agent.sources.cluster import ClusterSource
from bpf.verdicts import Mode
from tests import polling
from tests.agent.kube.apiserver import NODES, ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, server
from tests.agent.services.api.conftest import WAIT_SECONDS, request
from tests.agent.services.api.making import NODE, endpoint_json, service_json, slice_json, targets

__all__ = ["api", "kubeconfig", "listening", "server"]

WEB = Pod(uid="web-pod", namespace="default", name="web")


class Agent:
    """The cluster's side of one, without a container runtime."""

    def __init__(self, api: ApiClient, directory: pathlib.Path) -> None:
        self.conditions = Conditions()
        store, events = PodStore(self.conditions), PodEvents()
        settings = Settings(
            node_name=NODE,
            run_directory=directory,
            cri_socket=directory / "no-runtime.sock",
            service_endpoints=ServiceSettings(),
        )
        policies = ApiPolicies(api, state=directory / "policies.json")
        self.source = ClusterSource(api, settings, store, policies, PodModes(Mode.AUDIT))
        self.outputs = ClusterOutputs(api, settings, store, self.source, events, GateMetrics(store))
        assert self.outputs.endpoints is not None
        self.publisher = self.outputs.endpoints.publisher
        self.target = f"unix:{localnet_socket(directory)}"

    def probed(self, status: str, reason: str) -> None:
        self.conditions.set(WEB, labels.PROBES_PASSING, status, reason, "")

    async def shown(self, count: int) -> list[str]:
        """Over the socket, once there are `count` endpoints."""
        async with (
            asyncio.timeout(WAIT_SECONDS),
            grpc.aio.insecure_channel(self.target) as channel,
        ):
            instance_id = rev = 0
            while True:
                items = await request(channel, instance_id, rev)
                instance_id, rev = items[0].next.instance_id, items[0].next.rev
                found = targets(items[1].services.items[0].ports[0])
                if len(found) == count:
                    return found


@pytest.fixture
async def agent(server: ApiServer, api: ApiClient, tmp_path: pathlib.Path) -> AsyncIterator[Agent]:
    """Its node has one pod, which the kubelet calls ready, behind a service with one elsewhere."""
    server.put({"metadata": {"name": NODE, "uid": "n"}}, path=NODES)
    server.put(service_json(), path=SERVICES.path)
    here = endpoint_json("198.19.0.1", node=NODE, uid="web-pod")
    server.put(slice_json(here, endpoint_json("198.19.0.2")), path=SLICES.path)
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    server.put(
        {
            "metadata": {"namespace": "default", "name": "web", "uid": "web-pod"},
            "spec": {"nodeName": NODE, "containers": [{"name": "app"}]},
            "status": {"phase": "Running", "conditions": [ready]},
        }
    )
    made = Agent(api, tmp_path)
    running = [asyncio.create_task(made.source.run()), asyncio.create_task(made.outputs.run())]
    async with asyncio.timeout(WAIT_SECONDS):
        await made.publisher.wait_newer(0, 0)
        await polling.until("the pod", lambda: made.source.pods.get("web-pod"))
    yield made
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_pod_with_failing_probes_is_left_out_until_they_pass(agent: Agent) -> None:
    assert len(await agent.shown(2)) == 2
    agent.probed(FALSE, "ProbeFailing")
    assert await agent.shown(1) == ["198.19.0.2:8080"]
    agent.probed(TRUE, "ProbesPassing")
    assert len(await agent.shown(2)) == 2


async def test_failing_pod_is_left_out_without_an_api_server(
    agent: Agent, server: ApiServer
) -> None:
    async def away(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=503)

    server.faults.append(away)
    for stream in list(server.streams):
        await stream.cut()
    async with asyncio.timeout(WAIT_SECONDS):
        await polling.until("a problem", lambda: "endpointslices" in agent.outputs.api_problems)
    agent.probed(FALSE, "ProbeFailing")
    assert await agent.shown(1) == ["198.19.0.2:8080"]


async def test_deleted_pod_is_left_out_before_the_slices_lose_it(
    agent: Agent, server: ApiServer
) -> None:
    assert len(await agent.shown(2)) == 2
    server.delete("web")
    assert await agent.shown(1) == ["198.19.0.2:8080"]


async def test_readiness_by_the_kubelet_counts_without_an_api_server(
    agent: Agent, server: ApiServer
) -> None:
    """podgate does not probe this pod."""

    async def away(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=503)

    server.faults.append(away)
    for stream in list(server.streams):
        await stream.cut()
    assert len(await agent.shown(2)) == 2
    of_api = agent.source.pods.of_api("web-pod")
    assert of_api is not None
    (ready,) = of_api.status.conditions
    unready = msgspec.structs.replace(
        ready, status="False", last_transition_time="2026-01-01T00:01:00Z"
    )
    status = msgspec.structs.replace(of_api.status, conditions=(unready,))
    agent.source.pods.set_pod(KUBELET, msgspec.structs.replace(of_api, status=status))
    assert await agent.shown(1) == ["198.19.0.2:8080"]
    agent.source.pods.set_pod(KUBELET, of_api)
    assert len(await agent.shown(2)) == 2
