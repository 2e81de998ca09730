"""PodInfo beside a kubelet's recorded stream: never partial, never older than it was."""

import asyncio
import base64
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest

from agent.client.v1alpha1 import podinfo_pb2
from agent.kube import api_pods
from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod
from agent.kubelet import kubelet_pb2, pods_api_reading
from agent.kubelet.pods_api import KubeletPods
from tests import polling
from tests.agent.api.podinfo.serving import Calls, Node
from tests.agent.api.podinfo.test_service import Agent, running
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, opened, server
from tests.agent.kubelet.test_pods_api_recorded import AT_START, Replay, streams

__all__ = ["api", "kubeconfig", "listening", "server"]

API = podinfo_pb2.CONDITION_SOURCE_API
KUBELET = podinfo_pb2.CONDITION_SOURCE_KUBELET
TRUE, FALSE = podinfo_pb2.CONDITION_STATUS_TRUE, podinfo_pb2.CONDITION_STATUS_FALSE

FIRST, AFTER_RESTART = streams()
ALL, LIST_END, LIFE = FIRST[:AT_START], FIRST[AT_START], FIRST[AT_START + 1 :]
RUNNING, ENDED, DELETED = LIFE[2], LIFE[-2], LIFE[-1]
"""Of one pod: Ready is True since 08, False since 11."""


def read(message: bytes) -> ApiPod:
    return pods_api_reading.read(kubelet_pb2.WatchPodsEvent.FromString(message).pod)


UID = read(RUNNING).uid


def in_api(message: bytes, **fields: Any) -> Any:
    """The API server's object of a recorded pod. fields: of its condition Ready."""
    thing = msgspec.to_builtins(read(message))
    for condition in thing["status"]["conditions"]:
        if condition["type"] == "Ready":
            condition.update(fields)
    return thing


def unverified(message: bytes) -> bytes:
    """As a kubelet of 1.37 sends a ready pod whose status it has not computed since its start
    (getEffectivePodStatus in pkg/kubelet/apis/pods)."""
    event = kubelet_pb2.WatchPodsEvent.FromString(message)
    pod = kubelet_pb2.Pod.FromString(event.pod)
    for condition in pod.status.conditions:
        if condition.type == "Ready" and condition.status == "True":
            condition.status = "False"
            condition.reason = "ContainersNotReady"
            condition.message = "Kubelet is initializing pod containers"
    event.pod = pod.SerializeToString()
    return bytes(event.SerializeToString())


class Kubelet(Replay):
    """Can also reject streams, as one of 1.37 does before it has read its sources."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initializing = False
        self.rejected = 0

    async def _watch(
        self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        if self.is_initializing:
            self.rejected += 1
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "Kubelet is initializing")
        async for message in super()._watch(request, context):
            yield message


class Beside:
    """One agent beside the kubelet, and its client."""

    def __init__(self, agent: Agent, followed: KubeletPods, calls: Calls) -> None:
        self.agent = agent
        self.followed = followed
        self.calls = calls

    async def ready(self, uid: str = UID) -> tuple[int, int]:
        """Status and source of the pod's condition Ready."""
        found = (await self.calls.got(uid)).pod.conditions
        return next((one.status, one.source) for one in found if one.type == "Ready")

    async def wait_ready(self, status: int, source: int) -> None:
        await polling.request_until("Ready", self.ready, lambda found: found == (status, source))

    async def wait_disconnected(self) -> None:
        await polling.until("no stream", lambda: not self.followed.is_connected)

    async def wait_connected(self) -> None:
        await polling.until("a stream", lambda: self.followed.is_connected)


@pytest.fixture
def kubelet() -> Kubelet:
    return Kubelet()


@pytest.fixture(autouse=True)
def few_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an API server there are none to wait for."""
    monkeypatch.setattr(api_pods, "_LABELS_SECONDS", 0.05)


@contextlib.asynccontextmanager
async def beside(
    api: ApiClient, node: Node, kubelet: Kubelet, *, settle_seconds: float = 600
) -> AsyncIterator[Beside]:
    """An agent's life beside a kubelet's."""
    path = node.directory / "pods-api.sock"
    agent = Agent(api, node.directory)
    # Back after a twentieth of the usual time.
    followed = KubeletPods(
        agent.source, socket=path, jitter=lambda: -0.45, settle_seconds=settle_seconds
    )
    async with kubelet.running(path), running(agent, node) as calls:
        following = asyncio.create_task(followed.run())
        try:
            yield Beside(agent, followed, calls)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_list_is_not_complete_before_the_kubelets_is(
    node: Node, listening: pathlib.Path, kubeconfig: str, kubelet: Kubelet
) -> None:
    kubelet.put(ALL[:3])
    async with (
        opened(kubeconfig) as api,
        beside(api, node, kubelet, settle_seconds=0.05) as seen,
    ):
        await polling.until("three pods", lambda: len(seen.agent.source.current) == 3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await seen.calls.listed()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        kubelet.put([*ALL[3:], LIST_END])
        await seen.agent.pod_info.is_ready.wait()
        assert len((await seen.calls.listed()).pods) == AT_START


async def test_list_that_a_starting_kubelet_ends_first_is_not_complete(
    node: Node, listening: pathlib.Path, kubeconfig: str, kubelet: Kubelet
) -> None:
    list_end, *added = AFTER_RESTART
    kubelet.put([list_end, *added[:3]])
    async with opened(kubeconfig) as api, beside(api, node, kubelet) as seen:
        await polling.until("three pods", lambda: len(seen.agent.source.current) == 3)
        assert not seen.agent.source.is_synced


async def test_kubelets_last_report_counts_after_its_stream_has_ended(
    node: Node, listening: pathlib.Path, kubeconfig: str, kubelet: Kubelet
) -> None:
    """The API server, which has an older one, is away as well."""
    api_server = ApiServer()
    api_server.put(in_api(RUNNING))
    kubelet.put([*ALL, LIST_END, *LIFE[:-1]])
    async with opened(kubeconfig) as api, beside(api, node, kubelet) as seen:
        async with api_server.running(listening):
            await seen.agent.pod_info.is_ready.wait()
            await seen.wait_ready(FALSE, KUBELET)
            await polling.until("its object", lambda: seen.agent.source.of_api(UID))
        kubelet.end()
        await seen.wait_disconnected()
        for _ in range(20):
            assert await seen.ready() == (FALSE, KUBELET)
            await asyncio.sleep(0.01)


async def test_later_report_of_the_api_server_counts_after_the_stream_has_ended(
    node: Node, server: ApiServer, api: ApiClient, kubelet: Kubelet
) -> None:
    """As the node's controller sets it when the node has not reported for long."""
    server.put(in_api(RUNNING))
    kubelet.put([RUNNING, LIST_END])
    async with beside(api, node, kubelet) as seen:
        await seen.agent.pod_info.is_ready.wait()
        await seen.wait_ready(TRUE, KUBELET)
        later = in_api(RUNNING, status="False", lastTransitionTime="2026-11-21T23:51:00Z")
        server.put(later)
        # While the kubelet reports, it is right.
        await polling.until(
            "the later object",
            lambda: str(seen.agent.source.of_api(UID)).count("23:51:00"),
        )
        assert await seen.ready() == (TRUE, KUBELET)
        kubelet.end()
        await seen.wait_ready(FALSE, API)


async def test_kubelets_last_report_survives_the_agent(
    node: Node, listening: pathlib.Path, kubeconfig: str, kubelet: Kubelet
) -> None:
    api_server = ApiServer()
    api_server.put(in_api(RUNNING))
    kubelet.put([RUNNING, LIST_END])
    async with (
        api_server.running(listening),
        opened(kubeconfig) as api,
        beside(api, node, kubelet) as seen,
    ):
        await seen.agent.pod_info.is_ready.wait()
        await seen.wait_ready(TRUE, KUBELET)
        kubelet.put([ENDED])
        await seen.wait_ready(FALSE, KUBELET)
    # From here on there are neither an API server nor a kubelet.
    kubelet.is_initializing = True
    async with opened(kubeconfig) as api, beside(api, node, kubelet) as seen:
        await seen.agent.pod_info.is_ready.wait()
        assert await seen.ready() == (FALSE, KUBELET)
        (condition,) = [
            one for one in (await seen.calls.got(UID)).pod.conditions if one.type == "Ready"
        ]
        assert not condition.HasField("observe_time")


async def test_status_that_a_started_kubelet_has_not_verified_does_not_count(
    node: Node, server: ApiServer, api: ApiClient, kubelet: Kubelet
) -> None:
    server.put(in_api(RUNNING))
    kubelet.put([RUNNING, LIST_END])
    async with beside(api, node, kubelet) as seen:
        await seen.agent.pod_info.is_ready.wait()
        await seen.wait_ready(TRUE, KUBELET)
        kubelet.end()
        await seen.wait_disconnected()
        kubelet.put([unverified(RUNNING), *ALL[:1], LIST_END])
        first = read(ALL[0]).uid
        await polling.until("the next pod", lambda: first in seen.agent.source.uids)
        assert (await seen.ready())[0] == TRUE
        # It has computed another one.
        kubelet.put([ENDED])
        await seen.wait_ready(FALSE, KUBELET)


async def test_status_of_a_started_kubelet_counts_once_it_has_settled(
    node: Node, server: ApiServer, api: ApiClient, kubelet: Kubelet
) -> None:
    server.put(in_api(RUNNING))
    kubelet.put([unverified(RUNNING), LIST_END])
    async with beside(api, node, kubelet, settle_seconds=0.2) as seen:
        await seen.agent.pod_info.is_ready.wait()
        await seen.wait_ready(FALSE, KUBELET)


async def test_kubelet_that_starts_without_api_server_ends_no_pod(
    node: Node, listening: pathlib.Path, kubeconfig: str, kubelet: Kubelet
) -> None:
    api_server = ApiServer()
    for message in ALL:
        api_server.put(in_api(message))
    api_server.put(in_api(RUNNING))
    kubelet.put([*ALL, ENDED, LIST_END])
    async with (
        opened(kubeconfig) as api,
        beside(api, node, kubelet, settle_seconds=0.05) as seen,
    ):
        async with api_server.running(listening):
            await seen.agent.pod_info.is_ready.wait()
            await seen.wait_ready(FALSE, KUBELET)
            await polling.until("all pods", lambda: len(seen.agent.source.pods.objects) == 9)
        kubelet.end()
        await seen.wait_disconnected()
        kubelet.put([LIST_END])
        await seen.wait_connected()
        await asyncio.sleep(0.5)
        assert len((await seen.calls.listed()).pods) == AT_START + 1
        assert await seen.ready() == (FALSE, KUBELET)


async def test_pod_that_the_kubelet_has_deleted_does_not_come_back(
    node: Node, server: ApiServer, api: ApiClient, kubelet: Kubelet
) -> None:
    server.put(in_api(RUNNING))
    kubelet.put([*ALL, RUNNING, LIST_END])
    async with beside(api, node, kubelet) as seen:
        await seen.agent.pod_info.is_ready.wait()
        await seen.wait_ready(TRUE, KUBELET)
        kubelet.put([DELETED])
        await polling.until("no pod", lambda: UID not in seen.agent.source.uids)
        # The watch is behind.
        late = in_api(ENDED)
        server.put(late)
        server.put(in_api(ALL[0]))
        first = read(ALL[0]).uid
        await polling.until("the next event", lambda: seen.agent.source.of_api(first))
        assert UID not in seen.agent.source.uids
        server.delete(late["metadata"]["name"], namespace=late["metadata"]["namespace"])
        # The manifest of a static pod has the same uid when it is put back.
        kubelet.put([RUNNING])
        await polling.until("the pod", lambda: UID in seen.agent.source.uids)


async def test_kubelet_that_is_initializing_is_tried_every_second(
    node: Node, server: ApiServer, api: ApiClient, kubelet: Kubelet
) -> None:
    server.put(in_api(RUNNING))
    kubelet.is_initializing = True
    async with beside(api, node, kubelet) as seen:
        await seen.agent.pod_info.is_ready.wait()
        # By the back-off after other failures it would take minutes.
        await polling.until("attempts", lambda: kubelet.rejected >= 40)
        assert seen.followed.problem == "Kubelet is initializing"
        assert await seen.ready() == (TRUE, API)
        kubelet.is_initializing = False
        kubelet.put([ENDED, LIST_END])
        await seen.wait_ready(FALSE, KUBELET)


def test_recording_is_as_these_tests_need_it() -> None:
    def ready(message: bytes) -> tuple[str, str | None]:
        found = read(message).condition("Ready")
        assert found is not None
        return found.status, found.last_transition_time

    assert ready(RUNNING) == ("True", "2026-11-21T23:50:08Z")
    assert ready(ENDED) == ("False", "2026-11-21T23:50:11Z")
    assert base64.b64encode(LIST_END) == b"CAQ="
