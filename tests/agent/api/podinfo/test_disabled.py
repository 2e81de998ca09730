"""PodInfo with and without its feature gate, on the same sockets."""

import asyncio
import contextlib
import pathlib
import stat
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from agent.api.podinfo import sockets
from agent.api.podinfo.disabled import MESSAGE, DisabledPodInfo
from agent.api.podinfo.methods import (
    GET,
    GET_POD,
    LIST,
    LIST_PODS,
    PODINFO,
    PODS,
    WATCH,
    WATCH_PODS,
)
from agent.client import base
from agent.client import podinfo as clients
from tests import polling
from tests.agent.api.podinfo.serving import PATIENCE_SECONDS, Node, code_of

OFF = (grpc.StatusCode.UNIMPLEMENTED, MESSAGE)


@contextlib.asynccontextmanager
async def disabled(run_directory: pathlib.Path) -> AsyncIterator[None]:
    running = asyncio.create_task(DisabledPodInfo(run_directory).run())
    try:
        for path in (sockets.podinfo(run_directory), sockets.pods_api(run_directory)):
            await polling.until("the socket", path.exists)
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    "method",
    [
        *(f"/{PODINFO}/{method}" for method in (LIST, WATCH, GET)),
        *(f"/{PODS}/{one}" for one in (LIST_PODS, WATCH_PODS, GET_POD)),
    ],
)
async def test_each_method_ends_with_unimplemented_and_what_to_do(node: Node, method: str) -> None:
    is_podinfo = method.startswith(f"/{PODINFO}/")
    path = (sockets.podinfo if is_podinfo else sockets.pods_api)(node.directory)
    async with disabled(node.directory), grpc.aio.insecure_channel(f"unix:{path}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_stream(method)(b"", timeout=PATIENCE_SECONDS).read()
        assert code_of(caught.value) == OFF


async def test_pods_api_stays_for_root_only(node: Node) -> None:
    async with disabled(node.directory):
        directory = sockets.pods_api(node.directory).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


async def test_health_is_not_serving(node: Node) -> None:
    async with disabled(node.directory), node.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        found = await stub.Check(
            health_pb2.HealthCheckRequest(service=PODINFO), timeout=PATIENCE_SECONDS
        )
        assert found.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_client_follows_the_gate_on_off_and_on_again(node: Node) -> None:
    """One client, which stays connected to the path."""
    node.add("web")
    async with clients.AsyncPodInfoClient(f"unix://{node.path}") as client:

        async def listed() -> object:
            """Names of the pods, or why there are none."""
            try:
                return [pod.pod_name for pod in (await client.list(PATIENCE_SECONDS)).pods]
            except base.StreamError as error:
                return error.code, str(error).endswith(MESSAGE)

        async with node.serving():
            assert await listed() == ["web"]
        async with disabled(node.directory):
            off = (grpc.StatusCode.UNIMPLEMENTED, True)
            await polling.request_until("the error", listed, lambda found: found == off)
        async with node.serving():
            await polling.request_until("pods again", listed, lambda found: found == ["web"])
