"""The node's pods, also while the API server is unreachable."""

import asyncio
import json
import pathlib
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import structlog.testing
from aiohttp import web

from agent import labels as agent_labels
from agent.kube.api_pods import ApiPods
from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod
from agent.kube.pod_reports import KUBELET
from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.object_labels import LabelSnapshot
from agent.pods.pod import Pod
from agent.pods.pod_modes import PodModes
from bpf.verdicts import Mode
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import ApiServer, pod
from tests.agent.kube.conftest import opened

pytestmark = pytest.mark.looptime

NAMESPACES = "/api/v1/namespaces"
NODES = "/api/v1/nodes"


class Published(Subscription):
    """ApiPods, and all changes of them in order."""

    def __init__(self, api: ApiClient, *, state: pathlib.Path | None = None) -> None:
        super().__init__()
        self.pods: dict[str, Pod] = {}
        self.published: list[str] = []
        self.objects: list[ApiPod] = []
        self.source = ApiPods(
            api,
            node_name="node1",
            modes=PodModes(Mode.ENFORCE, is_complete=False),
            state=state,
            jitter=lambda: 0.5,
        )
        self.source.changes.subscribe(self)

    def mark(self, uid: str) -> None:
        super().mark(uid)
        before, now = self.pods.get(uid), self.source.current.get(uid)
        if now != before:
            sign = "~" if now and before else "+" if now else "-"
            self.published += [f"{sign}{pod.name}" for pod in [now or before] if pod]
        self.pods = dict(self.source.current)
        of_api = self.source.of_api(uid)
        if of_api and of_api not in self.objects:
            self.objects.append(of_api)

    def mode(self, name: str) -> Mode:
        return next(one.mode for one in self.pods.values() if one.name == name)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Published"]:
        self.source.restore()
        task = asyncio.create_task(self.source.run())
        try:
            await asyncio.sleep(1)
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def labelled(name: str, **labels: str) -> Any:
    found = {f"podgate.io/{key.replace('_', '-')}": text for key, text in labels.items()}
    return {"metadata": {"name": name, "uid": f"uid-{name}", "labels": found}}


@pytest.fixture
def furnished(server: ApiServer) -> ApiServer:
    server.put(labelled("node1"), path=NODES)
    server.put(labelled("default"), path=NAMESPACES)
    server.put(pod("a"))
    return server


async def test_pods_come_change_and_go(furnished: ApiServer, api: ApiClient) -> None:
    async with Published(api).running() as published:
        furnished.put(pod("b"))
        await asyncio.sleep(1)
        furnished.put(pod("a", labels={agent_labels.MODE_LABEL: "strict"}))
        furnished.delete("b")
        await asyncio.sleep(1)
        assert published.published == ["+a", "+b", "~a", "-b"]
        assert published.source.is_synced


async def test_change_without_effect_on_the_pod_is_a_change_of_its_object_only(
    furnished: ApiServer, api: ApiClient
) -> None:
    async with Published(api).running() as published:
        furnished.put(
            {**pod("a"), "status": {"phase": "Running", "podIPs": [{"ip": "198.18.0.2"}]}}
        )
        await asyncio.sleep(1)
        assert published.published == ["+a"]
        assert len(published.objects) == 2


async def test_pod_replaced_under_the_same_name(furnished: ApiServer, api: ApiClient) -> None:
    async with Published(api).running() as published:
        furnished.delete("a")
        furnished.put(pod("a", uid="another"))
        await asyncio.sleep(1)
        assert published.published == ["+a", "-a", "+a"]
        assert set(published.pods) == {"another"}


async def test_mirror_pod_is_published_and_removed_by_the_runtimes_uid(
    furnished: ApiServer, api: ApiClient
) -> None:
    mirror = apiserver.recorded("mirror-pod")
    async with Published(api).running() as published:
        furnished.put(mirror)
        await asyncio.sleep(1)
        assert "25fc56ec767d2a7cf6725c538f7206da" in published.pods
        furnished.delete("stb-node1")
        await asyncio.sleep(1)
        assert published.published == ["+a", "+stb-node1", "-stb-node1"]


async def test_labels_of_namespace_and_node_decide_and_are_followed(
    furnished: ApiServer, api: ApiClient
) -> None:
    async with Published(api).running() as published:
        assert published.mode("a") is Mode.ENFORCE
        furnished.put(labelled("default", mode="audit"), path=NAMESPACES)
        await asyncio.sleep(1)
        assert published.mode("a") is Mode.AUDIT
        furnished.put(labelled("node1", mode="strict"), path=NODES)
        await asyncio.sleep(1)
        assert published.mode("a") is Mode.AUDIT
        furnished.put(labelled("node1", mode="strict", max_mode="off"), path=NODES)
        await asyncio.sleep(1)
        assert published.mode("a") is Mode.OFF
        # Selectors have the same.
        assert published.source.labels.snapshot() == LabelSnapshot(
            {"podgate.io/mode": "strict", "podgate.io/max-mode": "off"},
            {"default": {"podgate.io/mode": "audit"}},
        )
        furnished.put(labelled("node1"), path=NODES)
        furnished.delete("default", namespace="", path=NAMESPACES)
        await asyncio.sleep(1)
        assert published.mode("a") is Mode.ENFORCE
        assert published.source.labels.snapshot() == LabelSnapshot()


async def test_namespace_is_stricter_than_the_nodes_default(
    furnished: ApiServer, api: ApiClient
) -> None:
    async with Published(api).running() as published:
        furnished.put(labelled("default", mode="strict"), path=NAMESPACES)
        await asyncio.sleep(1)
        assert published.mode("a") is Mode.STRICT
        furnished.put(labelled("default", mode="stritc"), path=NAMESPACES)
        await asyncio.sleep(1)
        assert published.mode("a") is Mode.STRICT
        assert published.pods["uid-a"].mode_problems


@pytest.mark.parametrize("missing", [NAMESPACES, NODES])
async def test_gates_may_keep_their_mode_until_all_labels_are_listed(
    furnished: ApiServer, api: ApiClient, missing: str
) -> None:
    is_back = asyncio.Event()

    async def away(request: web.Request) -> web.StreamResponse | None:
        is_missing = request.path == missing and not is_back.is_set()
        return apiserver.error_response(503, "Unavailable") if is_missing else None

    furnished.faults.append(away)
    async with Published(api).running() as published:
        await asyncio.sleep(30)
        before = published.pods["uid-a"].kept_up_to
        is_back.set()
        await asyncio.sleep(60)
        assert (before, published.pods["uid-a"].kept_up_to) == (Mode.STRICT, Mode.OFF)


async def test_saved_labels_count_as_listed(
    furnished: ApiServer, api: ApiClient, tmp_path: pathlib.Path
) -> None:
    state = tmp_path / "pods.json"
    furnished.put(labelled("node1", mode="strict"), path=NODES)
    furnished.put(labelled("default", mode="audit"), path=NAMESPACES)
    async with Published(api, state=state).running() as published:
        await asyncio.sleep(5)
    restarted = Published(api, state=state)
    restarted.source.restore()
    assert restarted.pods["uid-a"].kept_up_to is Mode.OFF
    assert restarted.source.labels.snapshot() == published.source.labels.snapshot()
    assert restarted.source.labels.snapshot() == LabelSnapshot(
        {"podgate.io/mode": "strict"}, {"default": {"podgate.io/mode": "audit"}}
    )


@pytest.mark.parametrize(("path", "name"), [(NODES, "node1"), (NAMESPACES, "default")])
async def test_each_change_of_labels_is_saved(
    furnished: ApiServer, api: ApiClient, tmp_path: pathlib.Path, path: str, name: str
) -> None:
    state = tmp_path / "pods.json"
    async with Published(api, state=state).running():
        await asyncio.sleep(5)
        furnished.put(labelled(name, mode="audit"), path=path)
        await asyncio.sleep(5)
    restarted = Published(api, state=state)
    restarted.source.restore()
    assert restarted.mode("a") is Mode.AUDIT


async def test_nothing_is_published_before_the_labels_are_listed(
    furnished: ApiServer, api: ApiClient
) -> None:
    asking = asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse | None:
        if request.path == NAMESPACES:
            await asking.wait()
        return None

    furnished.put(labelled("default", mode="off"), path=NAMESPACES)
    furnished.faults.append(late)
    async with Published(api).running() as published:
        await asyncio.sleep(2)
        assert published.published == []
        asking.set()
        await asyncio.sleep(1)
        assert published.published == ["+a"]
        assert published.mode("a") is Mode.OFF


async def test_without_the_right_to_see_namespaces_the_nodes_default_holds(
    furnished: ApiServer, api: ApiClient, tmp_path: pathlib.Path
) -> None:
    async def forbid(request: web.Request) -> web.StreamResponse | None:
        return apiserver.error_response(403, "Forbidden") if request.path == NAMESPACES else None

    furnished.faults.append(forbid)
    state = tmp_path / "pods.json"
    with structlog.testing.capture_logs() as lines:
        async with Published(api, state=state).running() as published:
            await asyncio.sleep(15)
            assert published.published == ["+a"]
            assert published.mode("a") is Mode.ENFORCE
            assert published.source.namespaces.problem == "Forbidden"
            assert (published.source.is_synced, published.source.is_confirmed) == (True, True)
        problems = [line["problem"] for line in lines if line["event"] is Event.LABELS_UNKNOWN]
        assert problems == ["Forbidden"]
        # The next agent has the pods as they were.
        lines.clear()
        async with Published(api, state=state).running() as published:
            await asyncio.sleep(15)
            assert published.published == ["+a"]
        assert [line for line in lines if line["event"] is Event.LABELS_UNKNOWN] == []


async def test_annotation_without_effect_is_published(furnished: ApiServer, api: ApiClient) -> None:
    annotations = {agent_labels.NETNS_ANNOTATION: "/proc/1/ns/net"}
    async with Published(api).running() as published:
        furnished.put(pod("b", annotations=annotations))
        furnished.put(pod("b", annotations=annotations, generation=2))
        await asyncio.sleep(1)
        [problem] = published.source.current["uid-b"].annotation_problems
        assert problem.reason == "AnnotationIgnored"


async def test_whole_life_of_an_agent_without_api_server(
    listening: pathlib.Path, kubeconfig: str, tmp_path: pathlib.Path
) -> None:
    state = tmp_path / "state" / "pods.json"
    server = ApiServer()
    server.put(labelled("node1"), path=NODES)
    server.put(labelled("default", mode="audit"), path=NAMESPACES)
    server.put(pod("a"))
    async with (
        server.running(listening),
        opened(kubeconfig) as api,
        Published(api, state=state).running() as published,
    ):
        await asyncio.sleep(5)
        before = published.pods
    async with opened(kubeconfig) as api:
        restarted = Published(api, state=state)
        restarted.source.restore()
        assert restarted.pods == before
        assert restarted.mode("a") is Mode.AUDIT
        async with restarted.running():
            await asyncio.sleep(3600)
            assert restarted.published == ["+a"]
            assert restarted.source.is_synced
            assert restarted.source.pods.problem
            assert restarted.source.pods.requests < 200
    server.delete("a")
    server.put(pod("b"))
    async with (
        server.running(listening),
        opened(kubeconfig) as api,
        Published(api, state=state).running() as back,
    ):
        assert sorted(back.published) == ["+a", "+b", "-a"]


async def test_agent_goes_on_when_the_server_comes_back(
    listening: pathlib.Path, kubeconfig: str
) -> None:
    server = ApiServer()
    server.put(labelled("node1"), path=NODES)
    server.put(labelled("default"), path=NAMESPACES)
    server.put(pod("a"))
    async with opened(kubeconfig) as api, Published(api).running() as published:
        await asyncio.sleep(300)
        assert published.published == []
        async with server.running(listening):
            await asyncio.sleep(60)
            # Once more if it comes before the labels.
            assert published.published in (["+a"], ["+a", "~a"])
            assert published.pods["uid-a"].kept_up_to is Mode.OFF


async def test_saved_pods_are_for_root_and_hold_no_secrets(
    furnished: ApiServer, api: ApiClient, tmp_path: pathlib.Path
) -> None:
    state = tmp_path / "state" / "pods.json"
    secret = {"kubectl.kubernetes.io/last-applied-configuration": "hunter2"}
    thing = pod("b", annotations=secret)
    thing["spec"]["containers"][0]["env"] = [{"name": "PASSWORD", "value": "hunter2"}]
    furnished.put(thing)
    async with Published(api, state=state).running():
        await asyncio.sleep(5)
        content = state.read_text(encoding="utf-8")
        assert stat.S_IMODE(state.stat().st_mode) == 0o600
        assert stat.S_IMODE(state.parent.stat().st_mode) == 0o700
    assert "hunter2" not in content
    assert {one["metadata"]["name"] for one in json.loads(content)["pods"]} == {"a", "b"}


async def test_nothing_is_written_at_rest(
    furnished: ApiServer, api: ApiClient, tmp_path: pathlib.Path
) -> None:
    state = tmp_path / "pods.json"
    async with Published(api, state=state).running():
        await asyncio.sleep(5)
        before = state.stat().st_ino, state.stat().st_mtime_ns
        annotated = labelled("default")
        annotated["metadata"]["annotations"] = {"example.com/seen": "today"}
        furnished.put(annotated, path=NAMESPACES)
        await asyncio.sleep(600)
        assert (state.stat().st_ino, state.stat().st_mtime_ns) == before


@pytest.mark.parametrize("content", ["", "{", '{"pods": 1}', '{"node_name": "other", "pods": []}'])
async def test_saved_pods_that_cannot_be_used_are_left_alone(
    furnished: ApiServer, api: ApiClient, tmp_path: pathlib.Path, content: str
) -> None:
    state = tmp_path / "pods.json"
    state.write_text(content, encoding="utf-8")
    async with Published(api, state=state).running() as published:
        assert published.published == ["+a"]


def decoded(thing: Any, version: str) -> ApiPod:
    thing["metadata"]["resourceVersion"] = version
    return msgspec.convert(thing, ApiPod)


async def test_newest_version_counts_from_any_origin(furnished: ApiServer, api: ApiClient) -> None:
    async with Published(api).running() as published:
        published.source.set_pod(KUBELET, decoded(pod("a", labels={"is": "old"}), "9"))
        assert published.pods["uid-a"].labels == {}
        published.source.set_pod(KUBELET, decoded(pod("a", labels={"is": "new"}), "1000"))
        assert published.pods["uid-a"].labels == {"is": "new"}
        furnished.delete("a")
        await asyncio.sleep(1)
        assert "uid-a" in published.pods
        published.source.remove_pod(KUBELET, "uid-a")
        assert published.pods == {}


async def test_what_the_kubelet_has_dropped_is_gone(furnished: ApiServer, api: ApiClient) -> None:
    async with Published(api).running() as published:
        published.source.set_pod(KUBELET, decoded(pod("a"), "12"))
        published.source.remove_pod(KUBELET, "uid-a")
        assert published.published == ["+a", "-a"]


async def test_of_nodes_and_namespaces_only_the_metadata_is_read(
    furnished: ApiServer, api: ApiClient
) -> None:
    """They may be large, and an agent runs on each node."""
    async with Published(api).running():
        pass
    for path in (NAMESPACES, NODES):
        accepted = {one.headers["Accept"].split(",")[0] for one in furnished.of(path)}
        assert accepted
        assert all("as=PartialObjectMetadata" in one for one in accepted)
