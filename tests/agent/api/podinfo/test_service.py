"""In a cluster: pods of API server and kubelet, also while the API server is away."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc
import pytest

from agent import labels
from agent.api.podinfo import service as podinfo_service
from agent.api.podinfo import sockets
from agent.api.podinfo.service import PodInfoService
from agent.client.v1alpha1 import podinfo_pb2
from agent.kube.api_pods import ApiPods
from agent.kube.client import ApiClient
from agent.kube.pod_reports import KUBELET
from agent.kubelet import kubelet_pb2
from agent.logs import Event
from agent.pods.conditions import TRUE, Conditions
from agent.pods.pod import Pod
from agent.pods.pod_modes import PodModes
from bpf.verdicts import Mode
from tests import polling
from tests.agent.api.podinfo.serving import PATIENCE_SECONDS, Calls, Node
from tests.agent.api.podinfo.test_merge import pod as object_of
from tests.agent.kube.apiserver import ApiServer, pod, recorded
from tests.agent.kube.conftest import api, kubeconfig, listening, opened, server

__all__ = ["api", "kubeconfig", "listening", "server"]

API = podinfo_pb2.CONDITION_SOURCE_API
PODGATE = podinfo_pb2.CONDITION_SOURCE_PODGATE


class Agent:
    """As much of it as PodInfo is fed by."""

    def __init__(self, api: ApiClient, run_directory: pathlib.Path) -> None:
        self.source = ApiPods(
            api,
            node_name="node1",
            modes=PodModes(Mode.AUDIT),
            state=run_directory / "state" / "pods.json",
            keeps_whole=True,
        )
        self.conditions = Conditions()
        self.ending: dict[str, Pod] = {}
        """Pods that were deleted and still have a sandbox."""
        self.synced = asyncio.Event()
        self.pod_info = PodInfoService(
            run_directory,
            uids=lambda: (*self.source.current, *self.ending),
            pod_of=lambda uid: self.source.current.get(uid) or self.ending.get(uid),
            conditions_of=self.conditions.of,
            addresses_of=lambda uid: (),
            changes=(self.conditions.changes,),
            source=self.source,
            synced=self.synced,
            unready_because=lambda: None if self.source.is_synced else "nothing is known yet",
        )

    async def sync(self) -> None:
        """Set `synced` as the reconciler does."""
        await polling.until("all pods are listed", lambda: self.source.is_synced, seconds=600)
        self.synced.set()


@contextlib.asynccontextmanager
async def running(agent: Agent, node: Node) -> AsyncIterator[Calls]:
    agent.source.restore()
    running = [
        asyncio.create_task(run()) for run in (agent.source.run, agent.pod_info.run, agent.sync)
    ]
    try:
        await polling.until("the socket", sockets.podinfo(node.directory).exists)
        async with node.channel() as channel:
            yield Calls(channel)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def thing(name: str, ready: str) -> dict[str, object]:
    made: dict[str, object] = pod(name)
    made["status"] = {"conditions": [{"type": "Ready", "status": ready}]}
    return made


def is_confirmed(told: podinfo_pb2.WatchPodConditionsResponse) -> bool:
    """Whether this agent has received both pods from the API server."""
    conditions = [one for pod in told.pods for one in pod.conditions]
    return len(conditions) == 2 and all(
        one.source == API and one.HasField("observe_time") for one in conditions
    )


async def conditions_of(calls: Calls, uid: str) -> dict[str, podinfo_pb2.PodCondition]:
    return {one.type: one for one in (await calls.got(uid)).pod.conditions}


async def test_without_an_api_server_and_saved_state_calls_fail(
    node: Node, listening: pathlib.Path, kubeconfig: str
) -> None:
    async with opened(kubeconfig) as api, running(Agent(api, node.directory), node) as calls:
        with pytest.raises(grpc.aio.AioRpcError, match="nothing is known yet") as caught:
            await calls.listed()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_saved_pods_are_served_without_an_api_server_and_stay_fresh(
    node: Node, listening: pathlib.Path, kubeconfig: str
) -> None:
    server = ApiServer()
    server.put(thing("web", "True"))
    server.put(thing("other", "False"))
    async with server.running(listening), opened(kubeconfig) as api:
        first = Agent(api, node.directory)
        async with running(first, node) as calls:
            await first.pod_info.is_ready.wait()
            watch = calls.watched()
            while not is_confirmed(await watch.read()):
                pass
            watch.cancel()
    # From here on there is no API server at all.
    async with opened(kubeconfig) as api:
        second = Agent(api, node.directory)
        async with running(second, node) as calls:
            await second.pod_info.is_ready.wait()
            watch = calls.watched()
            assert [one.pod_name for one in (await watch.read()).pods] == ["other", "web"]
            # Not confirmed since the restart.
            ready = (await conditions_of(calls, "uid-web"))["Ready"]
            assert (ready.source, ready.HasField("observe_time")) == (API, False)
            web = second.source.current["uid-web"]
            second.conditions.set(web, labels.PROBES_PASSING, TRUE, "Passing", "")
            await watch.read()
            watch.cancel()
            passing = (await conditions_of(calls, "uid-web"))[labels.PROBES_PASSING]
            assert (passing.source, passing.HasField("observe_time")) == (PODGATE, True)


async def test_conditions_of_the_kubelet_are_published_at_once(
    node: Node, api: ApiClient, server: ApiServer
) -> None:
    server.put(thing("web", "True"))
    agent = Agent(api, node.directory)
    async with running(agent, node) as calls:
        await polling.until("one pod", lambda: len(agent.source.current) == 1)
        await agent.pod_info.is_ready.wait()
        watch = calls.watched()
        await watch.read()
        agent.source.set_pod(KUBELET, object_of("", uid="uid-web", Ready="False"))
        (condition,) = (await watch.read()).pods[0].conditions
        assert condition.source == podinfo_pb2.CONDITION_SOURCE_KUBELET
        assert condition.status == podinfo_pb2.CONDITION_STATUS_FALSE
        watch.cancel()


async def test_deleted_pod_is_gone_before_its_sandbox_is(
    node: Node, api: ApiClient, server: ApiServer
) -> None:
    """Without its objects it would have podgate's conditions alone."""
    server.put(thing("web", "True"))
    agent = Agent(api, node.directory)
    async with running(agent, node) as calls:
        await polling.until("one pod", lambda: len(agent.source.current) == 1)
        await agent.pod_info.is_ready.wait()
        web = agent.ending["uid-web"] = agent.source.current["uid-web"]
        agent.conditions.set(web, labels.PROBES_PASSING, TRUE, "Passing", "")
        watch = calls.watched()
        await watch.read()
        server.delete("web")
        while pods := (await watch.read()).pods:
            assert "Ready" in {one.type for one in pods[0].conditions}
        watch.cancel()


async def test_log_line_is_written_once_pods_can_be_served(
    node: Node, api: ApiClient, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Event] = []
    recorder = SimpleNamespace(info=lambda event, **fields: logged.append(event))
    monkeypatch.setattr(podinfo_service, "log", recorder)
    server.put(thing("web", "True"))
    agent = Agent(api, node.directory)
    held = asyncio.Event()
    agent.sync = held.wait  # type: ignore[method-assign,assignment]
    async with running(agent, node) as calls:
        with pytest.raises(grpc.aio.AioRpcError):
            await calls.listed()
        assert logged == []
        agent.synced.set()
        await polling.until("the line", lambda: logged == [Event.PODINFO_SERVING])
        assert await calls.listed()


async def test_pods_api_serves_whole_pods_of_the_api_server(
    node: Node, api: ApiClient, server: ApiServer
) -> None:
    """Through all of it: from the watch's JSON to protobuf on the socket."""
    server.put(recorded("pod-with-gate"))
    agent = Agent(api, node.directory)
    async with running(agent, node):
        await agent.pod_info.is_ready.wait()
        path = sockets.pods_api(node.directory)
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            call = channel.unary_unary("/v1alpha1.Pods/ListPods")
            content = await call(b"", timeout=PATIENCE_SECONDS)
        (pod,) = kubelet_pb2.ListPodsResponse.FromString(content).pods
        # Image, hostIP and qosClass.
        for value in (b"docker.io/rig/app:1", b"198.18.100.1", b"BestEffort"):
            assert value in pod


async def test_metrics_are_zero_before_the_first_client_and_count_the_first_one(
    node: Node, api: ApiClient, server: ApiServer
) -> None:
    server.put(thing("web", "True"))
    agent = Agent(api, node.directory)

    def count(name: str) -> float:
        metrics = agent.pod_info.collect()
        return next(one.value for found in metrics for one in found.samples if one.name == name)

    async with running(agent, node) as calls:
        await agent.pod_info.is_ready.wait()
        assert count("pod_info_endpoint_requests_total") == 0
        assert count("podgate_podinfo_watches") == 0
        assert len((await calls.listed()).pods) == 1
        assert count("pod_info_endpoint_requests_list") == 1


async def test_clients_that_connect_at_once_are_all_served(
    node: Node, api: ApiClient, server: ApiServer
) -> None:
    """All wait while gRPC is imported and started."""
    server.put(thing("web", "True"))
    agent = Agent(api, node.directory)
    async with running(agent, node):
        await agent.pod_info.is_ready.wait()
        pods_api = sockets.pods_api(node.directory)

        async def list_conditions() -> int:
            async with node.channel() as channel:
                return len((await Calls(channel).listed()).pods)

        async def list_pods() -> int:
            # Channels of one process share a connection unless they may not.
            options = (("grpc.use_local_subchannel_pool", 1),)
            async with grpc.aio.insecure_channel(f"unix:{pods_api}", options) as channel:
                call = channel.unary_unary("/v1alpha1.Pods/ListPods")
                content = await call(b"", timeout=PATIENCE_SECONDS)
            return len(kubelet_pb2.ListPodsResponse.FromString(content).pods)

        found = await asyncio.gather(
            *(list_conditions() for _ in range(5)), *(list_pods() for _ in range(5))
        )
        assert found == [1] * 10


async def test_sockets_without_clients_are_removed_at_the_end(
    node: Node, api: ApiClient, server: ApiServer
) -> None:
    async with running(Agent(api, node.directory), node):
        paths = [make(node.directory) for make in (sockets.podinfo, sockets.pods_api)]
        await polling.until("both sockets", lambda: all(path.exists() for path in paths))
    assert not any(path.exists() for path in paths)
