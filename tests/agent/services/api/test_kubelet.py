"""Service endpoints beside a kubelet's recorded stream: readiness of its pods with the API server
away, after its own restart, and after the agent's (KEP-4188)."""

import asyncio
import contextlib
import pathlib
import shutil
from collections.abc import AsyncIterator

import pytest

from agent.kube import api_pods
from agent.kube.client import ApiClient
from agent.kubelet import kubelet_pb2
from agent.kubelet.pods_api import KubeletPods
from agent.services.api import saved
from agent.services.api.api_objects import SERVICES, SLICES
from agent.settings import localnet_socket
from tests import polling
from tests.agent.api.podinfo.test_kubelet import (
    ALL,
    DELETED,
    ENDED,
    LIFE,
    LIST_END,
    RUNNING,
    UID,
    Kubelet,
    in_api,
    read,
    unverified,
)
from tests.agent.kube.apiserver import NODES, ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, opened
from tests.agent.services.api.conftest import WAIT_SECONDS
from tests.agent.services.api.making import NODE, endpoint_json, service_json, slice_json
from tests.agent.services.api.test_agent import Agent

__all__ = ["api", "kubeconfig", "listening"]

CREATED, STARTING, _, TERMINATING = LIFE[:4]
AWAY = "198.19.0.2:8080"
ADDRESSES = [address.ip for address in read(RUNNING).status.pod_ips]
IN_SLICE = f"{ADDRESSES[0]}:8080"


def changed(message: bytes, *, is_ready: bool, seconds: int) -> bytes:
    """The recorded pod, running, with a readiness that changed so long after its start."""
    event = kubelet_pb2.WatchPodsEvent.FromString(message)
    pod = kubelet_pb2.Pod.FromString(event.pod)
    for condition in pod.status.conditions:
        if condition.type == "Ready":
            condition.status = "True" if is_ready else "False"
            condition.lastTransitionTime.seconds += seconds
    event.pod = pod.SerializeToString()
    return bytes(event.SerializeToString())


@pytest.fixture(autouse=True)
def few_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an API server there are none to wait for."""
    monkeypatch.setattr(api_pods, "_LABELS_SECONDS", 0.05)


@pytest.fixture
def kubelet() -> Kubelet:
    return Kubelet()


def stored(*, is_ready: bool, uid: str = UID) -> ApiServer:
    """An API server, not running, with a service of two endpoints: the recorded pod, and a pod of
    another node."""
    made = ApiServer()
    made.put({"metadata": {"name": NODE, "uid": "n"}}, path=NODES)
    made.put(service_json(), path=SERVICES.path)
    put_slice(made, is_ready=is_ready, uid=uid)
    return made


def put_slice(server: ApiServer, *, is_ready: bool, uid: str = UID) -> None:
    here = endpoint_json(ADDRESSES[0], node=NODE, uid=uid, ready=is_ready)
    server.put(slice_json(here, endpoint_json("198.19.0.2")), path=SLICES.path)


def is_saved_as_ready(path: pathlib.Path) -> bool:
    """Of the recorded pod, in the slices that an agent saved."""
    found = saved.read(path)
    return found is not None and any(
        endpoint.conditions.ready
        for each in found.slices
        for endpoint in each.endpoints or ()
        if ADDRESSES[0] in (endpoint.addresses or ())
    )


@contextlib.asynccontextmanager
async def beside(
    api: ApiClient, directory: pathlib.Path, kubelet: Kubelet, *, settle_seconds: float = 600
) -> AsyncIterator[Agent]:
    """An agent's life beside a kubelet's."""
    socket = directory / "pods-api.sock"
    agent = Agent(api, directory)
    # Back after a twentieth of the usual time.
    agent.source.kubelet_pods = KubeletPods(
        agent.source.pods, socket=socket, jitter=lambda: -0.45, settle_seconds=settle_seconds
    )
    agent.source.start()
    async with kubelet.running(socket):
        running = [asyncio.create_task(run()) for run in (agent.source.run, agent.outputs.run)]
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await agent.publisher.wait_newer(0, 0)
                await polling.until("the socket", localnet_socket(directory).exists)
            yield agent
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.parametrize("uid", [UID, ""], ids=["by uid", "by address"])
async def test_recorded_life_of_a_pod_counts_without_an_api_server(
    tmp_path: pathlib.Path, listening: pathlib.Path, kubeconfig: str, kubelet: Kubelet, uid: str
) -> None:
    server = stored(is_ready=False, uid=uid)
    kubelet.put([*ALL, LIST_END, CREATED, STARTING])
    async with opened(kubeconfig) as api:
        running = contextlib.AsyncExitStack()
        await running.enter_async_context(server.running(listening))
        async with running, beside(api, tmp_path, kubelet) as agent:
            assert await agent.shown(1) == [AWAY]
            await running.aclose()
            kubelet.put([RUNNING])
            assert await agent.shown(2) == [IN_SLICE, AWAY]
            kubelet.put([changed(RUNNING, is_ready=False, seconds=1)])
            assert await agent.shown(1) == [AWAY]
            kubelet.put([changed(RUNNING, is_ready=True, seconds=2), TERMINATING])
            assert len(await agent.shown(2)) == 2
            kubelet.put([ENDED])
            assert await agent.shown(1) == [AWAY]


async def test_pod_that_has_ended_is_left_out_whatever_the_slices_have(
    tmp_path: pathlib.Path, listening: pathlib.Path, kubeconfig: str, kubelet: Kubelet
) -> None:
    """Evicted, or its containers are done; then it is deleted."""
    kubelet.put([*ALL, LIST_END, RUNNING])
    server = stored(is_ready=True)
    async with opened(kubeconfig) as api:
        running = contextlib.AsyncExitStack()
        await running.enter_async_context(server.running(listening))
        async with running, beside(api, tmp_path, kubelet) as agent:
            assert len(await agent.shown(2)) == 2
            await running.aclose()
            kubelet.put([ENDED])
            assert await agent.shown(1) == [AWAY]
            rev = agent.publisher.rev
            kubelet.put([DELETED])
            await polling.until("no pod", lambda: UID not in agent.source.pods.uids)
            assert await agent.shown(1) == [AWAY]
            assert agent.publisher.rev == rev
            # The manifest of a static pod has the same uid when it is put back.
            kubelet.put([RUNNING])
            assert len(await agent.shown(2)) == 2


async def test_last_report_counts_after_the_stream_and_the_agent_have_ended(
    tmp_path: pathlib.Path, listening: pathlib.Path, kubeconfig: str, kubelet: Kubelet
) -> None:
    server = stored(is_ready=True)
    server.put(in_api(RUNNING))
    kubelet.put([*ALL, LIST_END, RUNNING])
    async with (
        server.running(listening),
        opened(kubeconfig) as api,
        beside(api, tmp_path, kubelet) as agent,
    ):
        assert len(await agent.shown(2)) == 2
        kubelet.put([changed(RUNNING, is_ready=False, seconds=1)])
        assert await agent.shown(1) == [AWAY]
        kubelet.end()
        await polling.until("no stream", lambda: not agent.source.kubelet_pods.is_connected)
        assert await agent.shown(1) == [AWAY]
    # From here on there are neither an API server nor a kubelet.
    kubelet.is_initializing = True
    async with opened(kubeconfig) as api, beside(api, tmp_path, kubelet) as agent:
        assert await agent.shown(1) == [AWAY]
        assert agent.publisher.rev == 1


async def test_killed_agent_has_saved_the_report_that_its_saved_slices_followed(
    tmp_path: pathlib.Path,
    listening: pathlib.Path,
    kubeconfig: str,
    kubelet: Kubelet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_pods, "_SETTLE_SECONDS", 3600)
    state = tmp_path / "state"
    server = stored(is_ready=False)
    server.put(in_api(STARTING))
    kubelet.put([*ALL, LIST_END, STARTING])
    async with (
        server.running(listening),
        opened(kubeconfig) as api,
        beside(api, tmp_path, kubelet) as agent,
    ):
        assert await agent.shown(1) == [AWAY]
        assert agent.source.pods.saver
        await agent.source.pods.saver.save()
        kubelet.put([RUNNING])
        assert len(await agent.shown(2)) == 2
        put_slice(server, is_ready=True)
        services = state / "services.json"
        await polling.request_until(
            "saved slices", lambda: asyncio.to_thread(is_saved_as_ready, services), bool
        )
        at_kill = tmp_path / "at-kill"
        await asyncio.to_thread(shutil.copytree, state, at_kill)
    # Agents that end by themselves save once more.
    shutil.rmtree(state)
    at_kill.rename(state)
    # From here on there are neither an API server nor a kubelet.
    kubelet.is_initializing = True
    async with opened(kubeconfig) as api, beside(api, tmp_path, kubelet) as agent:
        assert len(await agent.shown(2)) == 2
        assert agent.publisher.rev == 1


async def test_status_that_a_started_kubelet_has_not_verified_changes_no_service(
    tmp_path: pathlib.Path, listening: pathlib.Path, kubeconfig: str, kubelet: Kubelet
) -> None:
    server = stored(is_ready=True)
    server.put(in_api(RUNNING))
    kubelet.put([RUNNING, LIST_END])
    async with (
        server.running(listening),
        opened(kubeconfig) as api,
        beside(api, tmp_path, kubelet) as agent,
    ):
        assert len(await agent.shown(2)) == 2
        rev = agent.publisher.rev
        kubelet.end()
        await polling.until("no stream", lambda: not agent.source.kubelet_pods.is_connected)
        kubelet.put([unverified(RUNNING), *ALL[:1], LIST_END])
        first = read(ALL[0]).uid
        await polling.until("the next pod", lambda: first in agent.source.pods.uids)
        assert len(await agent.shown(2)) == 2
        assert agent.publisher.rev == rev
        kubelet.put([changed(RUNNING, is_ready=False, seconds=1)])
        assert await agent.shown(1) == [AWAY]


async def test_newer_report_of_the_api_server_counts_after_the_stream_has_ended(
    tmp_path: pathlib.Path, listening: pathlib.Path, kubeconfig: str, kubelet: Kubelet
) -> None:
    """As the node's controller sets it when the node has not reported for long."""
    server = stored(is_ready=False)
    server.put(in_api(RUNNING))
    kubelet.put([RUNNING, LIST_END])
    async with (
        server.running(listening),
        opened(kubeconfig) as api,
        beside(api, tmp_path, kubelet) as agent,
    ):
        # The slices are older than the kubelet's report.
        assert len(await agent.shown(2)) == 2
        server.put(in_api(RUNNING, status="False", lastTransitionTime="2026-11-21T23:51:00Z"))
        kubelet.end()
        assert await agent.shown(1) == [AWAY]
