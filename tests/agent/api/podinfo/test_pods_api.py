"""The kubelet's pods API, called as a client of the kubelet calls it."""

import asyncio
import contextlib
import datetime
import stat
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest

from agent import labels
from agent.api.podinfo import metrics, pod_encoding
from agent.api.podinfo.merge import PodRecord
from agent.api.podinfo.pod_objects import PodObjects
from agent.api.podinfo.pods_api import PodsApiServer
from agent.kube.objects import ApiPod, ObjectMetadata, WholePod
from agent.kube.pod_reports import PodReports
from agent.kubelet import kubelet_pb2, pods_api_reading
from agent.pods.conditions import FALSE, Condition
from agent.pods.pod import read_pod
from tests import polling
from tests.agent.api.podinfo.serving import PATIENCE_SECONDS, Node, code_of
from tests.agent.api.podinfo.test_merge import pod as api_pod
from tests.agent.kube.apiserver import recorded

CHANGED_AT = datetime.datetime(2026, 11, 20, 8, tzinfo=datetime.UTC)


class Kubelet:
    """What it would be to its clients."""

    def __init__(
        self, channel: grpc.aio.Channel, served: PodsApiServer, objects: PodObjects
    ) -> None:
        self.server = served
        self.objects = objects
        self.content = b""
        self._channel = channel

    async def call(self, method: str, request: Any, answer: Any) -> Any:
        call = self._channel.unary_unary(
            f"/v1alpha1.Pods/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return await call(request, timeout=PATIENCE_SECONDS)

    async def get(self, uid: str) -> ApiPod:
        """The pod, as a reader of a part of it; `content` has all of it."""
        request = kubelet_pb2.GetPodRequest(podUID=uid)
        answer = await self.call("GetPod", request, kubelet_pb2.GetPodResponse)
        self.content = answer.pod
        return pods_api_reading.read(answer.pod)

    def watch(self) -> Any:
        call = self._channel.unary_stream(
            "/v1alpha1.Pods/WatchPods",
            response_deserializer=kubelet_pb2.WatchPodsEvent.FromString,
        )
        return call(b"", timeout=PATIENCE_SECONDS)


@contextlib.asynccontextmanager
async def serving(node: Node, **limits: Any) -> AsyncIterator[Kubelet]:
    path = node.directory / "pods-api" / "pods-api.sock"
    objects = PodObjects(node.records)
    served = PodsApiServer(
        objects,
        path,
        changes=node.changed,
        synced=node.synced,
        unready_because=lambda: node.unready_because,
        **limits,
    )
    running = asyncio.create_task(served.run())
    try:
        await polling.until("the socket", path.exists)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            yield Kubelet(channel, served, objects)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def whole_pod(content: Any) -> ApiPod:
    """The API server's object with all of its fields."""
    pod = msgspec.convert(content, ApiPod)
    pod.keep_whole(WholePod(msgspec.json.encode(content), is_json=True))
    return pod


def read_whole(content: bytes) -> ApiPod:
    """The kubelet's object with all of its fields."""
    pod = pods_api_reading.read(content)
    pod.keep_whole(WholePod(content, is_json=False))
    return pod


def pod_of_kubelet(version: int) -> bytes:
    """A pod as a kubelet sends it, with a field (12345) that no podgate knows."""
    content = {
        "metadata": {"name": "web", "namespace": "tests", "uid": "web", "resourceVersion": "7"},
        "spec": {"containers": [{"name": "app", "image": f"example.org/app:{version}"}]},
        "status": {
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "observedGeneration": 1,
                    "lastTransitionTime": "2026-11-20T08:00:00Z",
                }
            ]
        },
    }
    return pod_encoding.encode("Pod", content) + b"\xca\x83\x06\x05later"


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


async def test_pod_of_a_manifest_has_its_containers_and_confirmed_addresses(node: Node) -> None:
    """Fields of another type are left out, and a status that someone wrote into it."""
    annotations = {labels.NETNS_ANNOTATION: "/run/netns/web"}
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web", "namespace": "tests", "annotations": annotations},
        "spec": {
            "containers": [{"name": "app", "image": "example.org/app:1", "tty": "yes"}],
            "dnsPolicy": 5,
        },
        "status": {"podIPs": [{"ip": "198.18.0.9"}], "conditions": [5], "phase": "Failed"},
    }
    found = read_pod(document, source="web.yaml")
    web = node.add("web", manifest=found.manifest)
    node.addresses[web.uid] = ("198.18.0.2", "fd00:18::2")
    async with serving(node) as kubelet:
        await kubelet.get(web.uid)
        pod = kubelet_pb2.Pod.FromString(kubelet.content)
        assert (pod.metadata.uid, pod.metadata.name) == (web.uid, "web")
        assert dict(pod.metadata.annotations) == annotations
        (container,) = pod.spec.containers
        assert container.name == "app"
        assert b"example.org/app:1" in kubelet.content
        # The first is the field podIP, too.
        assert kubelet.content.count(b"198.18.0.2") == 2
        assert kubelet.content.count(b"fd00:18::2") == 1
        assert [one.ip for one in pod.status.podIPs] == ["198.18.0.2", "fd00:18::2"]
        assert {one.type for one in pod.status.conditions} == {
            labels.ISOLATION_READY,
            labels.PROBES_PASSING,
        }
        assert b"Failed" not in kubelet.content
        assert b"198.18.0.9" not in kubelet.content


async def test_pod_of_the_api_server_is_served_whole(node: Node) -> None:
    actual = whole_pod(recorded("pod-with-gate"))
    node.more = {actual.uid: PodRecord(reports=PodReports(of_api=actual))}
    async with serving(node) as kubelet:
        pod = await kubelet.get(actual.uid)
        assert pod == actual
        fields = {
            "image": b"docker.io/rig/app:1",
            "hostIP": b"198.18.100.1",
            "qosClass": b"BestEffort",
        }
        assert all(value in kubelet.content for value in fields.values()), fields
        assert b"FieldsV1" not in kubelet.content
        listed = await kubelet.call(
            "ListPods", kubelet_pb2.ListPodsRequest(), kubelet_pb2.ListPodsResponse
        )
        assert list(listed.pods) == [kubelet.content]


async def test_saved_pod_has_the_fields_that_were_saved(node: Node) -> None:
    saved = msgspec.convert(recorded("pod-with-gate"), ApiPod)
    assert saved.whole is None
    node.more = {saved.uid: PodRecord(reports=PodReports(of_api=saved))}
    async with serving(node) as kubelet:
        assert await kubelet.get(saved.uid) == saved


async def test_pod_of_the_kubelet_is_passed_on_byte_by_byte(node: Node) -> None:
    content = pod_of_kubelet(2)
    node.more = {"web": PodRecord(reports=PodReports(of_kubelet=read_whole(content)))}
    async with serving(node) as kubelet:
        await kubelet.get("web")
        assert kubelet.content == content


async def test_own_condition_replaces_the_kubelets_copy_and_nothing_else(node: Node) -> None:
    content = pod_of_kubelet(2)
    reported = read_whole(content)
    own = Condition("podgate.io/probes-passing", FALSE, "ProbeFailed", "refused", CHANGED_AT)
    record = PodRecord(reports=PodReports(of_kubelet=reported), own=(own,))
    node.more = {"web": record}
    async with serving(node) as kubelet:
        pod = await kubelet.get("web")
        passing = pod.condition(own.type)
        assert passing is not None
        assert (passing.status, passing.reason) == (FALSE, "ProbeFailed")
        assert pod.status.conditions[:-1] == reported.status.conditions
        assert pod.metadata == reported.metadata
        # Fields that podgate does not read.
        assert b"example.org/app:2" in kubelet.content


async def test_pods_are_in_the_kubelets_order(node: Node) -> None:
    for name in ("b", "c", "a"):
        node.add(name)
    async with serving(node) as kubelet:
        listed = await kubelet.call(
            "ListPods", kubelet_pb2.ListPodsRequest(), kubelet_pb2.ListPodsResponse
        )
        uids = [pods_api_reading.read(pod).uid for pod in listed.pods]
        assert uids == ["uid-a", "uid-b", "uid-c"]


async def test_deleted_pod_has_only_its_identity(node: Node) -> None:
    web = node.add("web", labels={"app": "web"})
    async with serving(node) as kubelet:
        watch = kubelet.watch()
        assert pods_api_reading.read((await watch.read()).pod).metadata.labels == {"app": "web"}
        await watch.read()
        node.remove(web)
        deleted = pods_api_reading.read((await watch.read()).pod)
        assert deleted == ApiPod(
            metadata=ObjectMetadata(name="web", namespace="tests", uid="uid-web")
        )
        watch.cancel()


async def test_only_pods_that_changed_are_encoded_and_only_for_clients(node: Node) -> None:
    pods = [node.add(f"pod{number}") for number in range(50)]
    async with serving(node) as kubelet:
        for number in range(20):
            node.set(pods[number], False)
        assert kubelet.objects.encoded == 0
        watch = kubelet.watch()
        for _ in range(51):
            await watch.read()
        assert kubelet.objects.encoded == 50
        node.set(pods[7], True)
        assert seen(await watch.read()) == (kubelet_pb2.MODIFIED, "pod7")
        assert kubelet.objects.encoded == 51
        # A second client gets what was encoded for the first.
        await kubelet.call("ListPods", kubelet_pb2.ListPodsRequest(), kubelet_pb2.ListPodsResponse)
        assert kubelet.objects.encoded == 51
        watch.cancel()


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
        assert code_of(caught.value) == (
            grpc.StatusCode.NOT_FOUND,
            "pod with UID other not found",
        )


async def test_calls_fail_before_the_list_is_complete(node: Node) -> None:
    node.unready_because = "initial sandbox list not finished"
    async with serving(node) as kubelet:
        for ask in (
            lambda: kubelet.watch().read(),
            lambda: kubelet.get("web"),
            lambda: kubelet.call("ListPods", kubelet_pb2.ListPodsRequest(), kubelet_pb2.Pod),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="initial sandbox list") as caught:
                await ask()
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_lists_are_limited_and_watches_are_not(node: Node) -> None:
    node.add("web")
    async with serving(node, calls_per_second=0.001) as kubelet:
        for _ in range(10):
            await kubelet.get("uid-web")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kubelet.get("uid-web")
        assert code_of(caught.value) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "rejected by rate limit",
        )
        for _ in range(20):
            watch = kubelet.watch()
            assert seen(await watch.read()) == (kubelet_pb2.ADDED, "web")
            watch.cancel()


async def test_requests_are_counted_by_method_and_status(node: Node) -> None:
    node.add("web")
    async with serving(node) as kubelet:
        await kubelet.get("uid-web")
        with pytest.raises(grpc.aio.AioRpcError):
            await kubelet.get("other")
        watch = kubelet.watch()
        await watch.read()
        watch.cancel()
        requests = kubelet.server.requests
        await polling.until("the watch has ended", lambda: requests["WatchPods", "Canceled"] == 1)
        assert requests["GetPod", "OK"] == requests["GetPod", "NotFound"] == 1
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for metric in metrics.collect_pods_api(kubelet.server.requests)
            for sample in metric.samples
        }
        assert samples["kubelet_pod_requests_total", "v1alpha1", "NotFound"] == 1
        assert samples["kubelet_pod_requests_get_total", "v1alpha1", "OK"] == 1
        assert samples["kubelet_pod_requests_watch_total", "v1alpha1", "Canceled"] == 1
