"""The kubelet's pods API, over a real unix socket."""

import asyncio
import contextlib
import copy
import datetime
import pathlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from agent.kube.api_pods import ApiPods
from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod, WholePod
from agent.kubelet import kubelet_pb2, pods_api_reading
from agent.kubelet.pods_api import KubeletPods
from agent.pods.pod import Pod
from agent.pods.pod_modes import PodModes
from bpf.verdicts import Mode
from tests import polling
from tests.agent.kube.apiserver import ApiServer, gated, pod, recorded

ADDED, MODIFIED, DELETED = kubelet_pb2.ADDED, kubelet_pb2.MODIFIED, kubelet_pb2.DELETED
_TIMES = ("lastTransitionTime", "startedAt", "creationTimestamp", "deletionTimestamp")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")


def encoded(thing: Any) -> bytes:
    """A pod as the kubelet would send it."""
    message = json_format.ParseDict(
        _as_protobuf(copy.deepcopy(thing)), kubelet_pb2.Pod(), ignore_unknown_fields=True
    )
    return bytes(message.SerializeToString())


def _as_protobuf(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_protobuf(one) for one in value]
    if not isinstance(value, dict):
        return value
    for name in _PROBES:
        if name in value:
            handler = {key: value[name].pop(key) for key in _HANDLERS if key in value[name]}
            value[name]["handler"] = handler
    for name in ("httpGet", "tcpSocket"):
        if name in value:
            port = value[name]["port"]
            is_name = isinstance(port, str)
            value[name]["port"] = {"type": 1, "strVal": port} if is_name else {"intVal": port}
    for name in _TIMES:
        if isinstance(value.get(name), str):
            moment = datetime.datetime.fromisoformat(value[name])
            value[name] = {"seconds": int(moment.timestamp())}
    return {name: _as_protobuf(one) for name, one in value.items() if one is not None}


def rich() -> Any:
    thing = gated("rich", labels={"a": "b"}, deletionTimestamp="2026-11-21T08:00:00Z")
    thing["metadata"]["resourceVersion"] = "7"
    thing["metadata"]["annotations"] = {"podgate.io/probes": "agent"}
    thing["spec"]["hostNetwork"] = True
    thing["spec"]["initContainers"] = [{"name": "side", "restartPolicy": "Always"}]
    thing["spec"]["containers"] = [
        {
            "name": "app",
            "ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}],
            "startupProbe": {
                "httpGet": {
                    "path": "/x",
                    "port": "http",
                    "scheme": "HTTPS",
                    "httpHeaders": [{"name": "A", "value": ""}],
                    "protocol": "HTTP1",
                },
                "failureThreshold": 30,
            },
            "readinessProbe": {"tcpSocket": {"port": 8080, "host": "h"}, "periodSeconds": 1},
            "livenessProbe": {
                "exec": {"command": ["true", "x"]},
                "terminationGracePeriodSeconds": 5,
            },
            "lifecycle": {"preStop": {"httpGet": {"port": 9, "path": "/bye"}}},
        },
        {
            "name": "other",
            "readinessProbe": {"grpc": {"port": 5, "service": "s", "mode": "TLS"}},
            "livenessProbe": {"httpGet": {"port": 6, "protocol": "HTTP2"}},
        },
    ]
    return thing


@pytest.mark.parametrize(
    "thing", [recorded("pod-with-gate"), recorded("mirror-pod"), rich(), pod("small")]
)
def test_kubelets_pod_is_the_api_servers(thing: Any) -> None:
    from_api = msgspec.convert(thing, ApiPod)
    assert pods_api_reading.read(encoded(thing)) == from_api


def test_fields_of_1_37_have_the_numbers_of_their_keps() -> None:
    """KEP-5999 and KEP-4939; the others are held to recordings."""
    assert kubelet_pb2.HTTPGetAction.FromString(b"\x32\x05HTTP2").protocol == "HTTP2"
    assert kubelet_pb2.GRPCAction.FromString(b"\x1a\x03TLS").mode == "TLS"


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"\x0a\x05ab", encoded({"metadata": {}})])
def test_invalid_bytes_are_rejected(content: bytes) -> None:
    with pytest.raises(pods_api_reading.PodDecodeError):
        pods_api_reading.read(content)


@given(st.binary(max_size=200), st.integers(min_value=-(2**63), max_value=2**63 - 1))
def test_any_bytes_are_a_pod_or_rejected(content: bytes, seconds: int) -> None:
    message = kubelet_pb2.Pod(metadata=kubelet_pb2.ObjectMeta(name="a"))
    message.metadata.deletionTimestamp.seconds = seconds
    for one in (content, message.SerializeToString() + content):
        with contextlib.suppress(pods_api_reading.PodDecodeError):
            pods_api_reading.read(one)


class FakeKubelet:
    """Sends the given events; ends each stream on request."""

    def __init__(self) -> None:
        self.first: list[tuple[Any, bytes]] = []
        self.changes: asyncio.Queue[tuple[Any, bytes] | grpc.StatusCode] = asyncio.Queue()
        self.says_all_are_told = True
        self.streams = 0
        self.known: set[str] | None = None
        """Uids that GetPod finds; None: all."""
        self.failing: list[grpc.StatusCode] = []
        """With what the next requests of GetPod end."""
        self.newest: dict[str, bytes] = {}
        """What GetPod returns for a uid, as of its request."""
        self.gate = asyncio.Event()
        """Cleared while no response is sent."""
        self.gate.set()
        self.requested: list[str] = []

    async def watch(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        self.streams += 1
        for kind, content in self.first:
            yield kubelet_pb2.WatchPodsEvent(type=kind, pod=content)
        if self.says_all_are_told:
            yield kubelet_pb2.WatchPodsEvent(type=kubelet_pb2.INITIAL_SYNC_COMPLETE)
        while True:
            change = await self.changes.get()
            if isinstance(change, grpc.StatusCode):
                await context.abort(change, "the client is too slow")
            kind, content = change
            yield kubelet_pb2.WatchPodsEvent(type=kind, pod=content)

    async def get(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """As pkg/kubelet/apis/pods/server.go does."""
        self.requested.append(request.podUID)
        if self.failing:
            await context.abort(self.failing.pop(0), "it fails")
        if self.known is not None and request.podUID not in self.known:
            message = f"pod with UID {request.podUID} not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        content = self.newest.get(request.podUID, b"")
        await self.gate.wait()
        return kubelet_pb2.GetPodResponse(pod=content)

    def running(self, path: pathlib.Path) -> AbstractAsyncContextManager[None]:
        handler = grpc.unary_stream_rpc_method_handler(
            self.watch,
            request_deserializer=kubelet_pb2.WatchPodsRequest.FromString,
            response_serializer=kubelet_pb2.WatchPodsEvent.SerializeToString,
        )
        get = grpc.unary_unary_rpc_method_handler(
            self.get,
            request_deserializer=kubelet_pb2.GetPodRequest.FromString,
            response_serializer=kubelet_pb2.GetPodResponse.SerializeToString,
        )
        return serving(path, handler, get)


@asynccontextmanager
async def serving(
    path: pathlib.Path,
    watch: "grpc.RpcMethodHandler[Any, Any]",
    get: "grpc.RpcMethodHandler[Any, Any] | None" = None,
) -> AsyncIterator[None]:
    """Serve the pods API on a socket. watch: the handler of WatchPods; get: that of GetPod."""
    server = grpc.aio.server()
    methods = {"WatchPods": watch} | ({"GetPod": get} if get else {})
    handler = grpc.method_handlers_generic_handler("v1alpha1.Pods", methods)
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


class Following:
    """ApiPods connected to the kubelet."""

    def __init__(
        self, api: ApiClient, socket: pathlib.Path, *, settle_seconds: float = 0.05
    ) -> None:
        self.source = ApiPods(
            api,
            node_name="node1",
            modes=PodModes(Mode.AUDIT),
        )
        # Back after a twentieth of the usual time: this is no fake clock.
        self.kubelet = KubeletPods(
            self.source,
            socket=socket,
            jitter=lambda: -0.45,
            settle_seconds=settle_seconds,
            confirm_seconds=0.02,
            again_seconds=0.02,
            keeps_whole=True,
        )

    @property
    def pods(self) -> dict[str, Pod]:
        return self.source.current

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.pods.values()}

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Following"]:
        tasks = [
            asyncio.create_task(self.source.run()),
            asyncio.create_task(self.kubelet.run()),
        ]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(holds: Callable[[], object]) -> None:
    await polling.until("the pods are published", holds)


@pytest.fixture
def socket(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "pods-api.sock"


async def test_pods_come_change_and_go(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    kubelet = FakeKubelet()
    kubelet.first = [(ADDED, encoded(pod("a"))), (ADDED, b"\xff"), (ADDED, encoded(pod("b")))]
    async with kubelet.running(socket), Following(api, socket).running() as seen:
        await until(lambda: seen.names == {"a", "b"})
        changed = pod("a", labels={"x": "y"})
        kubelet.changes.put_nowait((MODIFIED, encoded(changed)))
        kubelet.changes.put_nowait((DELETED, encoded(pod("b"))))
        await until(lambda: seen.names == {"a"})
        assert seen.pods["uid-a"].labels == {"x": "y"}
        of_kubelet = seen.source.reports("uid-a").of_kubelet
        assert of_kubelet
        assert of_kubelet.whole == WholePod(encoded(changed), is_json=False)
        assert seen.kubelet.problem == ""


async def test_previous_status_that_the_kubelet_sends_after_the_newest_is_replaced(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    """Both changes are of the same second, as a 1.36.2 kubelet sent them 0.3 ms apart."""
    previous, newest = (encoded(_ready("a", status)) for status in ("False", "True"))
    kubelet = FakeKubelet()
    kubelet.first = [(ADDED, previous)]
    kubelet.newest["uid-a"] = newest
    kubelet.gate.clear()
    async with kubelet.running(socket), Following(api, socket).running() as seen:
        await until(lambda: seen.names == {"a"})
        assert kubelet.requested == []
        kubelet.changes.put_nowait((MODIFIED, newest))
        await until(lambda: _is_ready(seen, "uid-a"))
        kubelet.changes.put_nowait((MODIFIED, previous))
        await until(lambda: not _is_ready(seen, "uid-a"))
        kubelet.gate.set()
        await until(lambda: _is_ready(seen, "uid-a"))
        assert set(kubelet.requested) == {"uid-a"}


async def test_status_that_is_requested_again_does_not_replace_a_later_event(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    """GetPod and the stream are two connections."""
    previous, newest = (encoded(_ready("a", status)) for status in ("False", "True"))
    kubelet = FakeKubelet()
    kubelet.first = [(ADDED, previous)]
    kubelet.newest["uid-a"] = previous
    kubelet.gate.clear()
    async with kubelet.running(socket), Following(api, socket).running() as seen:
        await until(lambda: seen.names == {"a"})
        kubelet.changes.put_nowait((MODIFIED, previous))
        await until(lambda: kubelet.requested == ["uid-a"])
        kubelet.changes.put_nowait((MODIFIED, newest))
        await until(lambda: _is_ready(seen, "uid-a"))
        kubelet.newest["uid-a"] = newest
        kubelet.gate.set()
        await until(lambda: kubelet.requested == ["uid-a"] * 2)
        assert _is_ready(seen, "uid-a")


async def test_deleted_pod_is_not_requested_again(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    """The kubelet may still have it, and sends nothing more about it."""
    kubelet = FakeKubelet()
    contents = {name: encoded(pod(name)) for name in ("a", "b")}
    kubelet.first = [(ADDED, content) for content in contents.values()]
    kubelet.newest = {f"uid-{name}": content for name, content in contents.items()}
    kubelet.gate.clear()
    async with kubelet.running(socket), Following(api, socket).running() as seen:
        await until(lambda: seen.names == {"a", "b"})
        for content in contents.values():
            kubelet.changes.put_nowait((MODIFIED, content))
        await until(lambda: kubelet.requested == ["uid-a"])
        kubelet.changes.put_nowait((DELETED, contents["b"]))
        await until(lambda: seen.names == {"a"})
        kubelet.gate.set()
        kubelet.changes.put_nowait((MODIFIED, contents["a"]))
        await until(lambda: kubelet.requested == ["uid-a", "uid-a"])
        assert seen.names == {"a"}


def _ready(name: str, status: str) -> Any:
    """A pod with its condition Ready, which changed in a certain second."""
    thing = pod(name)
    changed = "2026-11-23T17:44:19Z"
    thing["status"] = {
        "conditions": [{"type": "Ready", "status": status, "lastTransitionTime": changed}]
    }
    return thing


def _is_ready(seen: Following, uid: str) -> bool:
    condition = seen.source.reports(uid).condition("Ready")
    return condition is not None and condition.status == "True"


async def test_pods_missing_after_a_kubelet_restart_are_removed(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    kubelet = FakeKubelet()
    kubelet.first = [(ADDED, encoded(pod("a"))), (ADDED, encoded(pod("b")))]
    async with kubelet.running(socket), Following(api, socket).running() as seen:
        await until(lambda: seen.names == {"a", "b"})
        kubelet.first = [(ADDED, encoded(pod("b")))]
        kubelet.changes.put_nowait(grpc.StatusCode.RESOURCE_EXHAUSTED)
        await until(lambda: seen.names == {"b"})
        assert kubelet.streams == 2


async def test_kubelet_without_the_end_event_removes_nothing(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    kubelet = FakeKubelet()
    kubelet.says_all_are_told = False
    kubelet.first = [(ADDED, encoded(pod("a")))]
    async with kubelet.running(socket), Following(api, socket).running() as seen:
        await until(lambda: seen.names == {"a"})
        kubelet.first = [(ADDED, encoded(pod("b")))]
        kubelet.changes.put_nowait(grpc.StatusCode.UNAVAILABLE)
        await until(lambda: seen.names == {"a", "b"})


async def test_without_its_socket_the_api_server_goes_alone(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    server.put(pod("a"))
    async with Following(api, socket).running() as seen:
        await until(lambda: seen.names == {"a"} and bool(seen.kubelet.problem))
        kubelet = FakeKubelet()
        kubelet.first = [(ADDED, encoded(pod("b")))]
        async with kubelet.running(socket):
            await until(lambda: seen.names == {"a", "b"})
            assert seen.kubelet.problem == ""


async def test_agent_that_stops_while_the_stream_ends_stops(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    kubelet = FakeKubelet()
    async with kubelet.running(socket):
        seen = Following(api, socket)
        following = asyncio.create_task(seen.kubelet.run())
        await until(lambda: seen.kubelet.is_connected)
        (beside,) = (one for one in asyncio.all_tasks() if "changed pods" in one.get_name())
        beside.add_done_callback(lambda _: following.cancel())
        kubelet.changes.put_nowait(grpc.StatusCode.UNAVAILABLE)
        done, _ = await asyncio.wait([following], timeout=5.0)
        following.cancel()
        assert done


async def test_pod_that_ends_while_the_kubelet_is_away_goes_by_the_api_server(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    server.put(pod("a"))
    kubelet = FakeKubelet()
    fresh = pod("a", labels={"from": "kubelet"})
    fresh["metadata"]["resourceVersion"] = "5000"
    kubelet.first = [(ADDED, encoded(fresh))]
    async with Following(api, socket).running() as seen:
        async with kubelet.running(socket):
            await until(lambda: "uid-a" in seen.pods and bool(seen.pods["uid-a"].labels))
            await until(lambda: bool(seen.source.pods.objects))
        await until(lambda: not seen.kubelet.is_connected)
        # It had the newer version.
        assert seen.pods["uid-a"].labels
        server.delete("a")
        await until(lambda: seen.names == set())


def _stored(name: str) -> Any:
    """As the kubelet has a pod that it got from an API server."""
    thing = pod(name)
    thing["metadata"]["resourceVersion"] = "5"
    return thing


async def test_pod_whose_end_the_stream_missed_goes_when_the_kubelet_has_forgotten_it(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    kubelet = FakeKubelet()
    kubelet.known = {"uid-a"}
    kubelet.first = [(ADDED, encoded(_stored("a")))]
    server.put(pod("a"))
    async with kubelet.running(socket), Following(api, socket).running() as seen:
        await until(lambda: seen.names == {"a"} and bool(seen.source.pods.objects))
        server.delete("a")
        await until(lambda: len(kubelet.requested) >= 4)
        # Deleted by force, and its containers still run.
        assert seen.names == {"a"}
        kubelet.known.clear()
        await until(lambda: seen.names == set())
        assert kubelet.streams == 1


@pytest.mark.parametrize(
    "codes",
    [
        pytest.param([grpc.StatusCode.NOT_FOUND], id="it has just started"),
        pytest.param([grpc.StatusCode.UNAVAILABLE] * 4, id="it does not respond"),
        pytest.param(
            [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND],
            id="both",
        ),
    ],
)
async def test_pod_stays_until_the_kubelet_has_it_no_more_twice_in_a_row(
    server: ApiServer, api: ApiClient, socket: pathlib.Path, codes: list[grpc.StatusCode]
) -> None:
    kubelet = FakeKubelet()
    kubelet.failing = list(codes)
    kubelet.first = [(ADDED, encoded(_stored("a")))]
    async with kubelet.running(socket), Following(api, socket).running() as seen:
        await until(lambda: len(kubelet.requested) >= len(codes) + 2)
        assert seen.names == {"a"}


async def test_pods_of_api_server_and_manifests_are_not_confirmed(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    kubelet = FakeKubelet()
    kubelet.known = set()
    kubelet.first = [(ADDED, encoded(_stored("a"))), (ADDED, encoded(pod("static")))]
    server.put(pod("a"))
    kubelet.first.append((ADDED, encoded(_stored("gone"))))
    async with kubelet.running(socket), Following(api, socket).running() as seen:
        # Also the case before the kubelet's stream has sent the last pod.
        await until(lambda: bool(kubelet.requested) and seen.names == {"a", "static"})
        assert set(kubelet.requested) == {"uid-gone"}


async def test_static_pod_and_its_mirror_are_one(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    static = pod("static", uid="config-hash")
    mirror = pod("static", uid="api-uid", labels={"from": "api"})
    mirror["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "config-hash"}
    kubelet = FakeKubelet()
    kubelet.first = [(ADDED, encoded(static))]
    async with kubelet.running(socket), Following(api, socket).running() as seen:
        await until(lambda: set(seen.pods) == {"config-hash"})
        server.put(mirror)
        await until(lambda: seen.pods["config-hash"].labels == {"from": "api"})
        found = seen.source.get("config-hash")
        assert found is not None
        assert found.metadata.uid == "api-uid"
