"""From the API server to the socket, with and without an API server."""

import asyncio
import contextlib
import datetime
import pathlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest
from aiohttp import web

from agent.admin.report import SourceProblem
from agent.api.tls import CurrentTls
from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod, MetadataOnly
from agent.kube.pod_reports import PodReports
from agent.kube.watcher import Query, Watcher
from agent.pods.conditions import FALSE, Condition
from agent.services.api.api_objects import SERVICES, SLICES, ApiObjects
from agent.services.api.filters import FilterError, ServiceFilter
from agent.services.api.node_zones import FixedZone, WatchedZones
from agent.services.api.object_source import API_SERVER, Key, SourcePosition
from agent.services.api.objects import ApiService, EndpointSlice
from agent.services.api.source import NodesEndpoint, ServiceEndpoints
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.settings import localnet_socket
from tests import polling
from tests.agent.api.certificates import Authority
from tests.agent.kube.apiserver import NODES, ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, opened, server
from tests.agent.services.api.conftest import WAIT_SECONDS, request
from tests.agent.services.api.making import (
    NODE,
    Json,
    endpoint_json,
    read,
    service_json,
    slice_json,
    targets,
)

__all__ = ["api", "kubeconfig", "listening", "server"]


Position = tuple[int, int]
"""Instance id and revision."""


class Node:
    """One node's service endpoints, from an API server of the test's own."""

    def __init__(self, api: ApiClient, directory: pathlib.Path) -> None:
        query = Query("nodes", NODES, MetadataOnly, f"metadata.name={NODE}", is_metadata_only=True)
        self._nodes = Watcher(api, query, on_change=lambda old, new: None)
        self.endpoints = ServiceEndpoints(
            lambda on_service, on_slice: ApiObjects(api, on_service=on_service, on_slice=on_slice),
            node=NODE,
            zones=WatchedZones(self._nodes),
            run_directory=directory,
        )
        self._socket = localnet_socket(directory)
        self.target = f"unix:{self._socket}"
        self.rev = 0
        self.is_saved = False
        self.saved_at = datetime.datetime.min

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Node"]:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._nodes.run()),
                group.create_task(self.endpoints.run()),
            ]
            yield self
            for task in running:
                task.cancel()

    @property
    def services_listed(self) -> asyncio.Event:
        assert isinstance(self.endpoints.source, ApiObjects)
        return self.endpoints.source.service_watch.synced

    @property
    def is_published(self) -> bool:
        return self.endpoints.publisher.is_ready.is_set()

    async def newest(self) -> dict[str, pb.ServiceEndpoints]:
        """The next state by name, over the socket."""
        async with asyncio.timeout(WAIT_SECONDS):
            await self.endpoints.publisher.wait_newer(
                self.endpoints.publisher.instance_id, self.rev
            )
            await polling.until("the socket", self._socket.exists)
            async with grpc.aio.insecure_channel(self.target) as channel:
                items = await request(channel)
        self.rev = items[0].next.rev
        self.saved_at = items[0].saved_at.ToDatetime(datetime.UTC)
        self.is_saved = items[0].HasField("saved_at")
        return {one.name: one for item in items for one in item.services.items}


def put_node(server: ApiServer, zone: str = "a") -> None:
    labels = {"topology.kubernetes.io/zone": zone}
    server.put({"metadata": {"name": NODE, "uid": "n", "labels": labels}}, path=NODES)


def put_web(server: ApiServer, *endpoints: Json) -> None:
    server.put(slice_json(*endpoints), path=SLICES.path)


HERE = endpoint_json("198.19.0.1", node=NODE, zones=["a"], uid="web-pod")
AWAY = endpoint_json("198.19.0.2", zones=["b"])


@pytest.fixture
async def node(server: ApiServer, api: ApiClient, tmp_path: pathlib.Path) -> AsyncIterator[Node]:
    """In zone a, with one service of an endpoint here and one in zone b."""
    put_node(server)
    server.put(service_json(), path=SERVICES.path)
    put_web(server, HERE, AWAY)
    async with Node(api, tmp_path).running() as made:
        yield made


async def test_services_of_the_api_server_are_published(node: Node, server: ApiServer) -> None:
    assert targets((await node.newest())["web"].ports[0]) == ["198.19.0.1:8080"]
    put_web(server, {**HERE, "hints": None}, AWAY)
    assert targets((await node.newest())["web"].ports[0]) == [
        "198.19.0.1:8080",
        "198.19.0.2:8080",
    ]
    server.delete("web", path=SERVICES.path)
    assert await node.newest() == {}


@pytest.mark.parametrize("path", [SLICES.path, NODES])
async def test_no_state_is_published_before_all_resources_are_listed(
    server: ApiServer, api: ApiClient, tmp_path: pathlib.Path, path: str
) -> None:
    server.put(service_json(), path=SERVICES.path)
    may_tell = asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse | None:
        if request.path == path:
            await may_tell.wait()
        return None

    server.faults.append(hold)
    async with Node(api, tmp_path).running() as node:
        asking = asyncio.create_task(node.newest())
        async with asyncio.timeout(WAIT_SECONDS):
            await node.services_listed.wait()
        await asyncio.sleep(0.2)
        assert (asking.done(), node.endpoints.publisher.rev) == (False, 0)
        may_tell.set()
        assert list(await asking) == ["web"]


async def test_last_state_is_served_without_an_api_server(node: Node, server: ApiServer) -> None:
    await node.newest()

    async def away(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=503)

    server.faults.append(away)
    for stream in list(server.streams):
        await stream.cut()
    async with asyncio.timeout(WAIT_SECONDS):
        await polling.until("a problem", lambda: node.endpoints.source.problems)
    async with grpc.aio.insecure_channel(node.target) as channel:
        items = await request(channel)
    assert items[-1].end.service_count == 1


async def put_all(server: ApiServer, kubeconfig: str, directory: pathlib.Path) -> None:
    """One agent's life with an API server that has one service."""
    put_node(server)
    server.put(service_json(), path=SERVICES.path)
    put_web(server, HERE, AWAY)
    async with opened(kubeconfig) as api, Node(api, directory).running() as node:
        await node.newest()
        assert not node.is_saved


async def test_saved_services_are_served_with_their_age_without_an_api_server(
    listening: pathlib.Path, kubeconfig: str, tmp_path: pathlib.Path
) -> None:
    server = ApiServer()
    before = datetime.datetime.now(datetime.UTC)
    async with server.running(listening):
        await put_all(server, kubeconfig, tmp_path)
    after = datetime.datetime.now(datetime.UTC)
    async with opened(kubeconfig) as api, Node(api, tmp_path).running() as node:
        # In zone a, as then.
        assert targets((await node.newest())["web"].ports[0]) == ["198.19.0.1:8080"]
        assert node.is_saved
        assert before <= node.saved_at <= after


async def test_saved_services_are_replaced_by_one_complete_state(
    listening: pathlib.Path, kubeconfig: str, tmp_path: pathlib.Path
) -> None:
    server = ApiServer()
    async with server.running(listening):
        await put_all(server, kubeconfig, tmp_path)
    server.put(service_json("other"), path=SERVICES.path)
    put_web(server, {**HERE, "hints": None}, AWAY)
    may_tell = asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse | None:
        if request.path == SLICES.path:
            await may_tell.wait()
        return None

    server.faults.append(hold)
    async with (
        server.running(listening),
        opened(kubeconfig) as api,
        Node(api, tmp_path).running() as node,
    ):
        assert list(await node.newest()) == ["web"]
        async with asyncio.timeout(WAIT_SECONDS):
            await node.services_listed.wait()
        await asyncio.sleep(0.2)
        assert node.endpoints.publisher.rev == node.rev
        may_tell.set()
        found = await node.newest()
        assert sorted(found) == ["other", "web"]
        assert len(targets(found["web"].ports[0])) == 2
        assert not node.is_saved


async def outlive_its_file(server: ApiServer, kubeconfig: str, directory: pathlib.Path) -> Position:
    """An agent is killed right after it has published a service; what its clients have."""
    async with opened(kubeconfig) as api, Node(api, directory).running() as node:
        await node.newest()
        server.put(service_json("later"), path=SERVICES.path)
        while "later" not in await node.newest():
            pass
        written = (directory / "state" / "services.json").read_bytes()
    # An agent that is not killed saves when it ends.
    (directory / "state" / "services.json").write_bytes(written)
    assert b"later" not in written
    return node.endpoints.publisher.instance_id, node.rev


async def test_client_keeps_services_that_a_killed_agent_has_not_saved(
    listening: pathlib.Path,
    kubeconfig: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.services.api.source._SAVE_SECONDS", 3600.0)
    server = ApiServer()
    async with server.running(listening):
        await put_all(server, kubeconfig, tmp_path)
        position = await outlive_its_file(server, kubeconfig, tmp_path)
    async with opened(kubeconfig) as api, Node(api, tmp_path).running() as node:
        assert list(await node.newest()) == ["web"]
        assert node.is_saved
        async with grpc.aio.insecure_channel(node.target) as channel:
            asking = asyncio.create_task(request(channel, *position))
            # Answered at once, after the other was received.
            await asyncio.sleep(0)
            await request(channel)
            assert not asking.done()
            async with server.running(listening):
                items = await asking
        assert [one.name for item in items for one in item.services.items] == ["later", "web"]
        assert not items[0].HasField("saved_at")


async def test_client_with_a_filter_keeps_what_a_killed_agent_has_not_saved(
    listening: pathlib.Path,
    kubeconfig: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.services.api.source._SAVE_SECONDS", 3600.0)
    fields: dict[str, Any] = {"types": [pb.SERVICE_TYPE_EXTERNAL_NAME], "accepts_delta": True}
    external: Json = {"type": "ExternalName", "clusterIP": "", "externalName": "db.example"}
    server = ApiServer()
    async with server.running(listening):
        await put_all(server, kubeconfig, tmp_path)
        async with opened(kubeconfig) as api, Node(api, tmp_path).running() as node:
            await node.newest()
            async with grpc.aio.insecure_channel(node.target) as channel:
                first = (await request(channel, **fields))[0].next
                # Not in the view of clients without a filter.
                server.put(service_json("ext", **external), path=SERVICES.path)
                items = await request(channel, first.instance_id, first.rev, **fields)
            position = (items[0].next.instance_id, items[0].next.rev)
            written = (tmp_path / "state" / "services.json").read_bytes()
        # An agent that is not killed saves when it ends.
        (tmp_path / "state" / "services.json").write_bytes(written)
        assert b"db.example" not in written
    async with opened(kubeconfig) as api, Node(api, tmp_path).running() as node:
        await node.newest()
        async with grpc.aio.insecure_channel(node.target) as channel:
            asking = asyncio.create_task(request(channel, *position, **fields))
            # Answered at once, after the other was received.
            await asyncio.sleep(0)
            await request(channel)
            assert not asking.done()
            async with server.running(listening):
                items = await asking
    assert [one.name for item in items for one in item.services.items] == ["ext"]
    assert not items[0].HasField("saved_at")


async def test_saved_services_have_all_that_a_filter_can_request(
    listening: pathlib.Path, kubeconfig: str, tmp_path: pathlib.Path
) -> None:
    content = service_json(labels={"app": "web"}, type="LoadBalancer", status=INGRESS)
    content["metadata"]["annotations"] = {"example.org/owner": "shop"}
    server = ApiServer()
    put_node(server)
    server.put(content, path=SERVICES.path)
    put_web(server, {**HERE, "zone": "a"}, {**AWAY, "conditions": {"ready": False}})
    fields: dict[str, Any] = {
        "label_patterns": ["*"],
        "annotation_patterns": ["*"],
        "all_endpoints": True,
        "endpoint_details": True,
    }
    found = []
    for is_there in (True, False):
        async with contextlib.AsyncExitStack() as stack:
            if is_there:
                await stack.enter_async_context(server.running(listening))
            api = await stack.enter_async_context(opened(kubeconfig))
            node = await stack.enter_async_context(Node(api, tmp_path).running())
            await node.newest()
            assert node.is_saved is not is_there
            channel = grpc.aio.insecure_channel(node.target)
            async with channel:
                items = await request(channel, **fields)
            found.append([one for item in items for one in item.services.items])
    assert found[0] == found[1]
    (service,) = found[0]
    assert dict(service.annotations) == {"example.org/owner": "shop"}
    assert service.load_balancer_ingress[0].hostname == "web.example"
    assert service.ports[0].endpoints[0].pod.name == "p"
    assert service.ports[0].endpoints[0].zone == "a"


INGRESS: Json = {"loadBalancer": {"ingress": [{"hostname": "web.example"}]}}


async def test_client_with_the_saved_services_gets_readiness_of_local_pods(
    listening: pathlib.Path, kubeconfig: str, tmp_path: pathlib.Path
) -> None:
    server = ApiServer()
    put_node(server)
    server.put(service_json(), path=SERVICES.path)
    put_web(server, HERE, AWAY)
    async with (
        server.running(listening),
        opened(kubeconfig) as api,
        Node(api, tmp_path).running() as node,
    ):
        await node.newest()
    position = node.endpoints.publisher.instance_id, node.rev
    async with opened(kubeconfig) as api, Node(api, tmp_path).running() as node:
        node.endpoints.set_pod("web-pod", PodReports(of_api=pod()))
        now = datetime.datetime.now(datetime.UTC)
        node.endpoints.condition_changed("web-pod", condition(now, "ProbeFailing"))
        await node.newest()
        async with grpc.aio.insecure_channel(node.target) as channel:
            items = await request(channel, *position)
        (web_service,) = [one for item in items for one in item.services.items]
        assert targets(web_service.ports[0]) == ["198.19.0.2:8080"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 2}'])
async def test_saved_services_that_cannot_be_used_are_none(
    listening: pathlib.Path, kubeconfig: str, tmp_path: pathlib.Path, content: bytes
) -> None:
    path = tmp_path / "state" / "services.json"
    path.parent.mkdir()
    path.write_bytes(content)
    async with opened(kubeconfig) as api, Node(api, tmp_path).running() as node:
        await asyncio.sleep(0.2)
        assert not node.is_published
        server = ApiServer()
        put_node(server)
        server.put(service_json(), path=SERVICES.path)
        async with server.running(listening):
            assert list(await node.newest()) == ["web"]


class Fixed:
    """A source of one service, which has sent everything."""

    def __init__(self, name: str) -> None:
        self.name = name
        found: ApiService = read(service_json(), ApiService)
        self.services = {("default", "web"): found}
        self.slices: dict[Key, EndpointSlice] = {}
        self.synced = asyncio.Event()
        self.synced.set()
        self.saved_at: datetime.datetime | None = None
        self.problems: dict[str, str] = {}
        self.seeded: list[SourcePosition] = []

    def as_of(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC)

    def position(self) -> SourcePosition:
        return SourcePosition("5", "7")

    def seed(self, services: object, slices: object, position: SourcePosition) -> None:
        self.seeded.append(position)

    async def run(self) -> None:
        await asyncio.Event().wait()


async def run_once(
    source: Fixed, directory: pathlib.Path, zone: str = "a", others: NodesEndpoint | None = None
) -> ServiceEndpoints:
    """An agent's life until it has published in this zone, and serves other nodes if it is to."""
    zones = FixedZone(NODE, zone)
    endpoints = ServiceEndpoints(
        lambda on_service, on_slice: source,
        node=NODE,
        zones=zones,
        run_directory=directory,
        others=others,
    )
    running = asyncio.create_task(endpoints.run())
    async with asyncio.timeout(WAIT_SECONDS):
        await polling.until("a state", (directory / "state" / "services.json").exists)
        await endpoints.publisher.wait_newer(0, 0)
        await polling.until("its zone", lambda: endpoints.store.zones == zones.zones())
        await polling.until("its time", lambda: endpoints.saved_at == source.saved_at)
        if (server := endpoints.nodes_server) is not None:
            await polling.until("its port", lambda: server.is_serving)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return endpoints


async def test_watches_continue_at_the_saved_position_of_the_same_source_only(
    tmp_path: pathlib.Path,
) -> None:
    first, again, other = Fixed("first"), Fixed("first"), Fixed("other")
    for source in (first, again, other):
        await run_once(source, tmp_path)
    assert first.seeded == []
    assert again.seeded == [SourcePosition("5", "7")]
    assert other.seeded == [SourcePosition()]


async def test_saved_zone_that_a_node_has_no_more_is_forgotten(tmp_path: pathlib.Path) -> None:
    for zone in ("a", "b", ""):
        await run_once(Fixed("first"), tmp_path, zone)


async def test_source_that_sends_a_saved_state_is_a_problem(tmp_path: pathlib.Path) -> None:
    source = Fixed("hub:9655")
    source.saved_at = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    source.problems = {"hub:9655": "it does not respond"}
    endpoints = await run_once(source, tmp_path)
    assert endpoints.problems() == [
        SourceProblem(part="services", text="services from hub:9655: it does not respond"),
        SourceProblem(
            part="services",
            text="services are those saved at 2026-01-02T03:04:05+00:00; hub:9655 has not "
            "confirmed them since",
        ),
    ]
    assert endpoints.publisher.snapshot is not None
    saved = endpoints.publisher.snapshot.saved
    assert saved is not None
    assert saved.saved_at == endpoints.saved_at == source.saved_at
    source.saved_at = None
    source.problems = {}
    later = await run_once(source, tmp_path)
    assert (later.problems(), later.saved_at) == ([], None)
    # The report has those of the API server already.
    source.name = API_SERVER
    source.problems = {"services": "it does not respond"}
    assert later.problems() == []


async def test_agent_has_views_of_its_own_node_only(tmp_path: pathlib.Path) -> None:
    endpoints = await run_once(Fixed("first"), tmp_path)
    assert endpoints.nodes_server is None
    with (
        pytest.raises(FilterError, match="as node other uses them"),
        endpoints.publisher.views.hold(0, "other", ServiceFilter()),
    ):
        pass


async def test_agent_that_serves_other_nodes_has_their_views(tmp_path: pathlib.Path) -> None:
    tls = CurrentTls(Authority.make().files(tmp_path / "tls"))
    others = NodesEndpoint(("127.0.0.1", 0), tls)
    endpoints = await run_once(Fixed("first"), tmp_path, others=others)
    with endpoints.publisher.views.hold(0, "other", ServiceFilter()) as view:
        assert view.node == "other"


async def test_local_readiness_is_published_without_an_api_server(node: Node) -> None:
    now = datetime.datetime.now(datetime.UTC)
    await node.newest()
    node.endpoints.set_pod("web-pod", PodReports(of_api=pod()))
    node.endpoints.condition_changed("web-pod", condition(now, "ProbeFailing"))
    assert targets((await node.newest())["web"].ports[0]) == ["198.19.0.2:8080"]
    node.endpoints.condition_changed("web-pod", None)
    assert targets((await node.newest())["web"].ports[0]) == ["198.19.0.1:8080"]
    node.endpoints.end_pod("web-pod")
    assert targets((await node.newest())["web"].ports[0]) == ["198.19.0.2:8080"]


@pytest.mark.parametrize("namespace", [{}, {"namespace": "default"}])
async def test_endpoint_without_uid_follows_the_pod_that_it_names(
    node: Node, server: ApiServer, namespace: Json
) -> None:
    """As people write it in files."""
    await node.newest()
    named = msgspec.structs.replace(pod().metadata, uid="of-the-manifest")
    found = msgspec.structs.replace(pod(), metadata=named)
    now = datetime.datetime.now(datetime.UTC)
    node.endpoints.set_pod("of-the-manifest", PodReports(of_api=found))
    node.endpoints.condition_changed("of-the-manifest", condition(now, "ProbeFailing"))
    put_web(server, {**HERE, "targetRef": {"kind": "Pod", "name": "web", **namespace}}, AWAY)
    assert targets((await node.newest())["web"].ports[0]) == ["198.19.0.2:8080"]


async def test_results_of_probes_survive_the_agent(
    listening: pathlib.Path, kubeconfig: str, tmp_path: pathlib.Path
) -> None:
    server = ApiServer()
    put_node(server)
    server.put(service_json(), path=SERVICES.path)
    put_web(server, HERE, AWAY)
    now = datetime.datetime.now(datetime.UTC)
    async with (
        server.running(listening),
        opened(kubeconfig) as api,
        Node(api, tmp_path).running() as node,
    ):
        await node.newest()
        node.endpoints.set_pod("web-pod", PodReports(of_api=pod()))
        node.endpoints.condition_changed("web-pod", condition(now, "ProbeFailing"))
        await node.newest()
    async with opened(kubeconfig) as api, Node(api, tmp_path).running() as node:
        node.endpoints.set_pod("web-pod", PodReports(of_api=pod()))
        node.endpoints.condition_changed("web-pod", condition(now, "NoNetns"))
        node.endpoints.condition_changed("web-pod", condition(now, "ProbePending"))
        assert targets((await node.newest())["web"].ports[0]) == ["198.19.0.2:8080"]
        node.endpoints.condition_changed("web-pod", condition(now, "ProbesPassing"))
        assert targets((await node.newest())["web"].ports[0]) == ["198.19.0.1:8080"]


def pod() -> ApiPod:
    return msgspec.convert(
        {
            "metadata": {"name": "web", "namespace": "default", "uid": "web-pod"},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        },
        ApiPod,
    )


def condition(now: datetime.datetime, reason: str) -> Condition:
    return Condition("podgate.io/probes-passing", FALSE, reason, "", now)


WRONG: list[tuple[str, Callable[[], Json]]] = [
    ("ports", lambda: {**slice_json(AWAY, name="web-2"), "ports": "http"}),
    ("endpoints", lambda: {**slice_json(name="web-2"), "endpoints": [7]}),
    ("addresses", lambda: slice_json({**AWAY, "addresses": "x"}, name="web-2")),
    ("conditions", lambda: slice_json({**AWAY, "conditions": []}, name="web-2")),
    ("no service", lambda: slice_json(AWAY, name="web-2", service="")),
    ("nothing", lambda: {"metadata": {"name": "web-2", "namespace": "default"}}),
]


@pytest.mark.parametrize(("what", "wrong"), WRONG, ids=[what for what, _ in WRONG])
async def test_malformed_slice_affects_no_other(
    node: Node, server: ApiServer, what: str, wrong: Callable[[], Json]
) -> None:
    before = await node.newest()
    server.put(wrong(), path=SLICES.path)
    server.put(service_json("later"), path=SERVICES.path)
    after = await node.newest()
    assert after.pop("later").name == "later"
    assert after == before


@pytest.mark.parametrize("spec", [{"ports": "x"}, {"clusterIPs": 7}, {"type": None}])
async def test_malformed_service_keeps_its_last_state(
    node: Node, server: ApiServer, spec: dict[str, Any]
) -> None:
    before = await node.newest()
    server.put(service_json(**spec), path=SERVICES.path)
    server.put(service_json("later"), path=SERVICES.path)
    after = await node.newest()
    assert after["web"] == before["web"]
    assert sorted(after) == ["later", "web"]


async def test_socket_that_cannot_be_created_is_retried(
    server: ApiServer,
    api: ApiClient,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.api.listen._RETRY_SECONDS", 0.05)
    put_node(server)
    in_the_way = tmp_path / "localnet"
    in_the_way.write_text("not a directory", encoding="utf-8")
    async with Node(api, tmp_path).running() as node:
        async with asyncio.timeout(WAIT_SECONDS):
            await node.endpoints.publisher.wait_newer(0, 0)
        in_the_way.unlink()
        async with asyncio.timeout(WAIT_SECONDS):
            await polling.until("the socket", localnet_socket(tmp_path).exists)
        assert await node.newest() == {}
