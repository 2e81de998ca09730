"""A verdict belongs to one instance of a container, and needs no API server."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from agent import labels
from probes.spec.probespec import ANNOTATION, API_VERSION
from tests.agent.kube.apiserver import Json
from tests.kernel import nodeclient, offers
from tests.kernel.answered import RARE, SICK, Kubelet
from tests.kernel.cgroups import Cgroup
from tests.kernel.strictnode import RANGE4, RANGE6
from tests.node.node import PORT, Node, reason_of, status_of

pytestmark = pytest.mark.kernel

PROXIED = "200"
# Nothing listens, which the relay finds out before or after it accepts the kubelet's connection.
CLOSED = (nodeclient.REFUSED, nodeclient.RESET, nodeclient.ENDED)
# podgate's check waits until the kubelet reports the container as started, and then fails: the
# server has no such file. Its verdict holds for an hour.
CONTAINER: Json = {
    "startupProbe": {"exec": {"command": ["true"]}},
    "readinessProbe": {"httpGet": {"path": "/healthz", "port": PORT}, **RARE},
}
SPEC: Json = {
    "apiVersion": API_VERSION,
    "containers": [
        {
            "name": "app",
            "readiness": {"http": {"port": PORT, "path": "/missing"}, "answered": True, **RARE},
        }
    ],
}
ASLEEP = ("/bin/sleep", "1000000")


@pytest.fixture
async def sandbox(node: Node) -> str:
    """Of a pod in strict, whose containers the test runs."""
    offers.need_netns_cookie()
    await node.start_agent("--relay-range4", RANGE4, "--relay-range6", RANGE6)
    node.create(
        "web",
        container=CONTAINER,
        labels={labels.MODE_LABEL: "strict"},
        annotations={ANNOTATION: json.dumps(SPEC)},
    )
    return await node.driver.run_sandbox("web")


@pytest.fixture
async def kubelet(node: Node, sandbox: str, kubelet_cgroup: Cgroup) -> AsyncIterator[Kubelet]:
    report = await node.report("the relay", lambda report: reason_of(report, "web") == "Strict")
    (address, *_) = status_of(report, "web").addresses
    with nodeclient.node_client(kubelet_cgroup) as client:
        yield Kubelet(client, address, "/healthz")


def start_in_api(node: Node, container: str) -> None:
    """As the kubelet does when a container's startup probe has succeeded."""
    status = {"name": "app", "containerID": f"containerd://{container}", "started": True}
    node.change("web", lambda pod: pod["status"].update(containerStatuses=[status]))


async def until(kubelet: Kubelet, *results: str) -> list[str]:
    return await asyncio.to_thread(kubelet.until, *results)


async def test_a_failure_never_counts_against_the_next_container_of_the_sandbox(
    node: Node, sandbox: str, kubelet: Kubelet
) -> None:
    first = await node.driver.start_container(sandbox)
    start_in_api(node, first)
    await until(kubelet, SICK)
    await node.driver.stop_container(first)
    await until(kubelet, *CLOSED)
    second = await node.driver.start_container(sandbox, attempt=1)
    assert SICK not in await until(kubelet, PROXIED)
    # The first one's verdict would hold for an hour; the second one has none before it is started.
    assert await asyncio.to_thread(kubelet.results_after, 0.0) == {PROXIED}
    start_in_api(node, second)
    await until(kubelet, SICK)
    # The same without a time in which no container runs.
    await node.driver.stop_container(second)
    await node.driver.start_container(sandbox, attempt=2)
    await until(kubelet, PROXIED)
    assert await asyncio.to_thread(kubelet.results_after, 0.0) == {PROXIED}


async def test_verdicts_need_no_api_server(node: Node, sandbox: str, kubelet: Kubelet) -> None:
    container = await node.driver.start_container(sandbox)
    start_in_api(node, container)
    await until(kubelet, SICK)
    await node.stop_api()
    try:
        assert await asyncio.to_thread(kubelet.results_after, 0.0) == {SICK}
        await node.driver.stop_container(container)
        await until(kubelet, *CLOSED)
    finally:
        await node.start_api()
