"""The kubelet's pods API, called as a client of the kubelet calls it."""

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest

from agent import labels
from agent.api.podinfo import pod_objects
from agent.api.podinfo.merge import PodRecord
from agent.api.podinfo.pod_objects import PodsEncoder
from agent.api.podinfo.pods_api import PodsApiServer
from agent.api.podinfo.publisher import PodsPublisher
from agent.kube.objects import ApiPod
from agent.kube.pod_reports import PodReports
from agent.kubelet import kubelet_pb2, pods_api_reading
from tests import polling
from tests.agent.api.podinfo.serving import PATIENCE_SECONDS, Node, code_of
from tests.agent.api.podinfo.test_merge import pod as api_pod
from tests.agent.kube.apiserver import recorded


class Kubelet:
    """What it would be to its clients."""

    def __init__(self, channel: grpc.aio.Channel, telling: PodsPublisher) -> None:
        self.publisher = telling
        self._channel = channel

    async def call(self, method: str, request: Any, answer: Any) -> Any:
        call = self._channel.unary_unary(
            f"/v1alpha1.Pods/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return await call(request, timeout=PATIENCE_SECONDS)

    def watch(self) -> Any:
        call = self._channel.unary_stream(
            "/v1alpha1.Pods/WatchPods",
            response_deserializer=kubelet_pb2.WatchPodsEvent.FromString,
        )
        return call(b"", timeout=PATIENCE_SECONDS)


@contextlib.asynccontextmanager
async def serving(node: Node) -> AsyncIterator[Kubelet]:
    node.publisher = PodsPublisher(
        node.everything,
        encoder=PodsEncoder,
        header=pod_objects.header,
        synced=node.synced,
        unready_because=lambda: node.unready_because,
    )
    path = node.directory / "pods-api" / "pods-api.sock"
    running = [
        asyncio.create_task(node.publisher.run()),
        asyncio.create_task(PodsApiServer(node.publisher, path).run()),
    ]
    try:
        await polling.until("the socket", path.exists)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        if node.unready_because is None:
            await node.publisher.is_ready.wait()
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            yield Kubelet(channel, node.publisher)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def seen(event: Any) -> tuple[int, str]:
    return event.type, pods_api_reading.read(event.pod).metadata.name if event.pod else ""


async def test_watch_sends_all_pods_then_sync_complete_then_changes(node: Node) -> None:
    web = node.add("web")
    async with serving(node) as kubelet:
        watch = kubelet.watch()
        assert seen(await watch.read()) == (kubelet_pb2.ADDED, "web")
        assert seen(await watch.read()) == (kubelet_pb2.INITIAL_SYNC_COMPLETE, "")
        node.set(web, False)
        changed = await watch.read()
        assert seen(changed) == (kubelet_pb2.MODIFIED, "web")
        passing = pods_api_reading.read(changed.pod).condition(labels.PROBES_PASSING)
        assert passing is not None
        assert passing.status == "False"
        node.add("other")
        assert seen(await watch.read()) == (kubelet_pb2.ADDED, "other")
        node.remove(web)
        assert seen(await watch.read()) == (kubelet_pb2.DELETED, "web")
        watch.cancel()


async def test_pod_of_the_api_server_has_all_fields_except_probes(node: Node) -> None:
    actual = msgspec.convert(recorded("pod-with-gate"), ApiPod)
    node.more = {actual.uid: PodRecord(reports=PodReports(of_api=actual))}
    async with serving(node) as kubelet:
        request = kubelet_pb2.GetPodRequest(podUID=actual.uid)
        answer = await kubelet.call("GetPod", request, kubelet_pb2.GetPodResponse)
        told = pods_api_reading.read(answer.pod)
        assert told.metadata == actual.metadata
        # PodInfo's order is by type.
        assert set(told.status.conditions) == {
            msgspec.structs.replace(one, observed_generation=None)
            for one in actual.status.conditions
        }
        assert told.status.container_statuses == actual.status.container_statuses
        assert told.spec.readiness_gates == actual.spec.readiness_gates
        listed = await kubelet.call(
            "ListPods", kubelet_pb2.ListPodsRequest(), kubelet_pb2.ListPodsResponse
        )
        assert list(listed.pods) == [answer.pod]


async def test_static_pod_is_found_by_both_uids_and_others_are_not(node: Node) -> None:
    node.more = {
        "hash": PodRecord(reports=PodReports(of_api=api_pod("7", uid="api-uid", mirrors="hash")))
    }
    async with serving(node) as kubelet:
        for uid in ("hash", "api-uid"):
            request = kubelet_pb2.GetPodRequest(podUID=uid)
            answer = await kubelet.call("GetPod", request, kubelet_pb2.GetPodResponse)
            assert pods_api_reading.read(answer.pod).metadata.name == "web"
        request = kubelet_pb2.GetPodRequest(podUID="other")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kubelet.call("GetPod", request, kubelet_pb2.GetPodResponse)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_calls_fail_before_the_list_is_complete_and_above_the_rate(node: Node) -> None:
    node.unready_because = "not every sandbox has been looked at yet"
    async with serving(node) as kubelet:
        codes = set()
        for _ in range(40):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await kubelet.watch().read()
            codes.add(code_of(caught.value)[0])
        assert grpc.StatusCode.FAILED_PRECONDITION in codes
        assert codes <= {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED}
