"""The kubelet's cases of its pods API, on the one that podgate serves where the kubelet has none.

The kubelet has a queue of events for each client, and ends the watch of one that is slow; podgate
has none: a slow client gets the newest state of each pod once it reads again.
"""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from agent.api.podinfo import pod_encoding
from agent.api.podinfo.merge import PodRecord
from agent.kube.objects import ApiPod
from agent.kube.pod_reports import PodReports
from agent.kubelet import kubelet_pb2, pods_api_reading
from tests.agent.api.podinfo.conftest import node
from tests.agent.api.podinfo.serving import PATIENCE_SECONDS, Node
from tests.agent.api.podinfo.test_pods_api import (
    Kubelet,
    read_whole,
    seen,
    serving,
    whole_pod,
)
from tests.agent.api.upstream.inventory import UpstreamFile

__all__ = ["node"]

UNIT = UpstreamFile("pkg/kubelet/apis/pods/server_unit_test.go")
UNIT.none(
    "podgate drops no events: see above",
    "TestErrorsAndMetrics",
)
E2E = UpstreamFile("test/e2e_node/pods_api_test.go")
_E2E = "Kubelet Pods API"

ADDED, MODIFIED, DELETED = kubelet_pb2.ADDED, kubelet_pb2.MODIFIED, kubelet_pb2.DELETED
SYNCED = kubelet_pb2.INITIAL_SYNC_COMPLETE


def pod(name: str, phase: str = "Running", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns1", "uid": f"{name}-uid", **metadata},
        "spec": {"containers": [{"name": "app", "image": "busybox:1.36"}]},
        "status": {"phase": phase},
    }


def record(of_api: dict[str, Any] | None = None, kubelet: bytes = b"") -> PodRecord:
    """A pod as the API server has it, and as the kubelet sends it."""
    return PodRecord(
        reports=PodReports(
            of_api=whole_pod(of_api) if of_api else None,
            of_kubelet=read_whole(kubelet) if kubelet else None,
        )
    )


class Pods:
    """The pods of a node, by name."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def set(self, content: dict[str, Any]) -> None:
        uid = content["metadata"]["uid"]
        self._node.more[uid] = record(content)
        self._node.change(uid)

    def remove(self, name: str) -> None:
        del self._node.more[f"{name}-uid"]
        self._node.change(f"{name}-uid")


@pytest.fixture
def pods(node: Node) -> Pods:
    return Pods(node)


def phase(event: Any) -> str:
    return pods_api_reading.read(event.pod).status.phase


def is_identity(event: Any) -> bool:
    """Whether a pod has nothing but its name, namespace and uid."""
    found = kubelet_pb2.Pod.FromString(event.pod)
    identity = kubelet_pb2.Pod()
    for field in ("name", "namespace", "uid"):
        setattr(identity.metadata, field, getattr(found.metadata, field))
    return bool(event.pod == identity.SerializeToString() and found.metadata.uid)


@UNIT.single("TestStartEventLoop")
@UNIT.single("TestWatchPods")
@E2E.single(
    _E2E,
    "should receive INITIAL_SYNC_COMPLETE and coherent updates",
    "should receive events in the correct order: ADDED, MODIFIED, DELETED",
)
async def test_watch_pods(node: Node, pods: Pods) -> None:
    pods.set(pod("pod1", "Pending"))
    async with serving(node) as kubelet:
        watch = kubelet.watch()
        event = await watch.read()
        assert (*seen(event), phase(event)) == (ADDED, "pod1", "Pending")
        event = await watch.read()
        assert (event.type, event.pod) == (SYNCED, b"")
        for name, state, expected in (
            ("pod1", "Succeeded", MODIFIED),
            ("pod2", "Pending", ADDED),
            ("pod2", "Running", MODIFIED),
            ("pod2", "Failed", MODIFIED),
        ):
            pods.set(pod(name, state))
            event = await watch.read()
            assert (*seen(event), phase(event)) == (expected, name, state)
        for name in ("pod1", "pod2"):
            pods.remove(name)
            event = await watch.read()
            assert seen(event) == (DELETED, name)
            assert is_identity(event)
        # No event of a deleted pod comes later.
        pods.set(pod("pod3"))
        assert seen(await watch.read()) == (ADDED, "pod3")
        watch.cancel()


@UNIT.single("TestListPods")
async def test_list_pods(node: Node, pods: Pods) -> None:
    pods.set(pod("pod2"))
    pods.set(pod("pod1"))
    async with serving(node) as kubelet:
        assert [one.metadata.name for one in await listed(kubelet)] == ["pod1", "pod2"]


async def listed(kubelet: Kubelet) -> list[ApiPod]:
    answer = await kubelet.call(
        "ListPods", kubelet_pb2.ListPodsRequest(), kubelet_pb2.ListPodsResponse
    )
    return [pods_api_reading.read(content) for content in answer.pods]


@UNIT.single("TestGetPod")
async def test_get_pod(node: Node, pods: Pods) -> None:
    content = pod("pod1")
    debugger = {
        "name": "debugger",
        "image": "busybox",
        "command": ["sh"],
        "stdin": True,
        "tty": True,
    }
    content["spec"]["ephemeralContainers"] = [debugger]
    pods.set(content)
    async with serving(node) as kubelet:
        found = await kubelet.get("pod1-uid")
        assert (found.metadata.name, found.status.phase) == ("pod1", "Running")
        assert pod_encoding.encode("EphemeralContainer", debugger) in kubelet.content


@UNIT.single("TestStaticPod")
@E2E.single(_E2E, "should be able to list and watch static pods")
async def test_static_pod(node: Node, pods: Pods) -> None:
    annotations = {"kubernetes.io/config.source": "file"}
    async with serving(node) as kubelet:
        watch = kubelet.watch()
        assert (await watch.read()).type == SYNCED
        pods.set(pod("static-pod", annotations=annotations))
        assert seen(await watch.read()) == (ADDED, "static-pod")
        found = await kubelet.get("static-pod-uid")
        assert found.metadata.name == "static-pod"
        annotated = kubelet_pb2.Pod.FromString(kubelet.content).metadata.annotations
        assert dict(annotated) == annotations
        assert [one.metadata.name for one in await listed(kubelet)] == ["static-pod"]
        pods.remove("static-pod")
        assert seen(await watch.read()) == (DELETED, "static-pod")
        watch.cancel()


@E2E.single(_E2E, "should be able to list, get, and watch pods")
async def test_list_get_and_watch_have_the_same_pod(node: Node, pods: Pods) -> None:
    pods.set(pod("test-pod"))
    async with serving(node) as kubelet:
        (of_list,) = await listed(kubelet)
        watch = kubelet.watch()
        of_watch = pods_api_reading.read((await watch.read()).pod)
        assert of_list == of_watch == await kubelet.get("test-pod-uid")
        assert (await watch.read()).type == SYNCED
        pods.remove("test-pod")
        assert seen(await watch.read()) == (DELETED, "test-pod")
        watch.cancel()


@UNIT.single("TestSerialize")
async def test_serialize(node: Node, pods: Pods) -> None:
    """What clients decode is what was there, for pods of many forms."""
    chosen = random.Random(152)

    def text() -> str:
        return "".join(chosen.choices("aZ09-._/ äß中\t", k=chosen.randrange(40)))

    made = []
    for number in range(100):
        content = pod(
            f"pod{number:03}",
            chosen.choice(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
            labels={text(): text() for _ in range(chosen.randrange(5))},
            resourceVersion=str(chosen.getrandbits(60)),
            generation=chosen.getrandbits(60),
        )
        content["spec"]["hostNetwork"] = chosen.random() < 0.5
        content["status"]["podIPs"] = [{"ip": text()} for _ in range(chosen.randrange(3))]
        content["status"]["containerStatuses"] = [
            {"name": f"c{text()}", "ready": True, "restartCount": chosen.getrandbits(31)}
        ]
        made.append(msgspec.convert(content, ApiPod))
        pods.set(content)
    async with serving(node) as kubelet:
        for found, expected in zip(await listed(kubelet), made, strict=True):
            assert found.metadata == expected.metadata
            assert found.spec.host_network == expected.spec.host_network
            assert found.status.phase == expected.status.phase
            assert found.status.pod_ips == expected.status.pod_ips
            assert found.status.container_statuses == expected.status.container_statuses


@UNIT.single("TestBroadcaster_SlowClient")
async def test_slow_client(node: Node, pods: Pods) -> None:
    async with serving(node) as kubelet:
        fast, slow = [kubelet.watch() for _ in range(3)], kubelet.watch()
        for watch in (*fast, slow):
            assert (await watch.read()).type == SYNCED
        for number in range(10):
            pods.set(pod("pod1", generation=number))
            for watch in fast:
                event = await watch.read()
                assert pods_api_reading.read(event.pod).metadata.generation == number
        # The slow one has not lost the newest state, and is still connected.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while pods_api_reading.read((await slow.read()).pod).metadata.generation != 9:
                pass
        for watch in (*fast, slow):
            watch.cancel()


@pytest.fixture
def overlaid(node: Node) -> None:
    """A pod whose status is newer with the kubelet."""
    content = pod("pod1", "Running")
    running = pod_encoding.encode("Pod", content)
    node.more = {"pod1-uid": record(pod("pod1", "Pending"), running)}


@pytest.mark.usefixtures("overlaid")
@UNIT.single("TestStatusOverlay", "GetPod overlays status")
async def test_get_pod_overlays_status(node: Node) -> None:
    async with serving(node) as kubelet:
        assert (await kubelet.get("pod1-uid")).status.phase == "Running"


@pytest.mark.usefixtures("overlaid")
@UNIT.single("TestStatusOverlay", "ListPods overlays status")
async def test_list_pods_overlays_status(node: Node) -> None:
    async with serving(node) as kubelet:
        assert [one.status.phase for one in await listed(kubelet)] == ["Running"]


@pytest.mark.usefixtures("overlaid")
@UNIT.single("TestStatusOverlay", "WatchPods overlays status in initial sync")
async def test_watch_pods_overlays_status_in_initial_sync(node: Node) -> None:
    async with serving(node) as kubelet:
        watch = kubelet.watch()
        assert phase(await watch.read()) == "Running"
        watch.cancel()
