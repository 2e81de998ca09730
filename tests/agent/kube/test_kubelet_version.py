"""The kubelet's User-Agent follows from its version in the Node object."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.kube.client import ApiClient
from agent.kube.kubelet_version import KubeletVersion, user_agent
from tests.agent.kube.apiserver import NODES, ApiServer, error_response

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("v1.36.2", "kube-probe/1.36"),
        ("v1.33.1+k3s1", "kube-probe/1.33"),
        ("v1.33.5-eks-3025e55", "kube-probe/1.33+"),
        ("v1.33.5-gke.1080000", "kube-probe/1.33+"),
        ("v1.37.0-alpha.1.23+0123456789abcd", "kube-probe/1.37+"),
        ("", None),
        ("1.36.2", None),
        ("v1", None),
        ("v1.36.2\nX: y", None),
    ],
)
def test_user_agent_is_as_the_build_of_that_version_has_it(
    version: str, expected: str | None
) -> None:
    assert user_agent(version) == expected


class Published:
    """The User-Agents, in order."""

    def __init__(self) -> None:
        self.agents: list[str] = []
        self.needed = asyncio.Event()


@asynccontextmanager
async def running(api: ApiClient) -> AsyncIterator[tuple[Published, KubeletVersion]]:
    published = Published()
    made = KubeletVersion(
        api,
        "node1",
        needed=published.needed,
        publish=published.agents.append,
        jitter=lambda: 0.5,
    )
    task = asyncio.create_task(made.run())
    try:
        yield published, made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def put_node(server: ApiServer, version: str) -> None:
    info = {"nodeInfo": {"kubeletVersion": version, "kubeProxyVersion": ""}}
    server.put({"metadata": {"name": "node1", "namespace": ""}, "status": info}, path=NODES)


async def test_nothing_is_requested_before_it_is_needed(server: ApiServer, api: ApiClient) -> None:
    put_node(server, "v1.34.1")
    async with running(api) as (published, _):
        await asyncio.sleep(7200)
        assert server.of(NODES) == []
        published.needed.set()
        await asyncio.sleep(10)
        assert published.agents == ["kube-probe/1.34"]
        (request,) = server.of(NODES)
        assert request.query["fieldSelector"] == "metadata.name=node1"


async def test_version_is_read_again_after_a_restart_of_the_kubelet(
    server: ApiServer, api: ApiClient
) -> None:
    put_node(server, "v1.34.1")
    async with running(api) as (published, version):
        published.needed.set()
        await asyncio.sleep(10)
        put_node(server, "v1.35.0")
        version.hint()
        await asyncio.sleep(60)
        assert published.agents == ["kube-probe/1.34", "kube-probe/1.35"]


async def test_version_is_read_again_now_and_then(server: ApiServer, api: ApiClient) -> None:
    put_node(server, "v1.34.1")
    async with running(api) as (published, _):
        published.needed.set()
        await asyncio.sleep(10)
        put_node(server, "v1.35.0")
        await asyncio.sleep(7200)
        assert set(published.agents) == {"kube-probe/1.34", "kube-probe/1.35"}
        assert 3 <= len(server.of(NODES)) <= 6


async def test_failed_request_is_sent_again(server: ApiServer, api: ApiClient) -> None:
    put_node(server, "v1.34.1")

    async def fail(_: object) -> object:
        return error_response(403, "Forbidden")

    server.faults.append(fail)  # type: ignore[arg-type]
    async with running(api) as (published, _):
        published.needed.set()
        await asyncio.sleep(60)
        assert published.agents == []
        server.faults.clear()
        await asyncio.sleep(300)
        assert published.agents == ["kube-probe/1.34"]
