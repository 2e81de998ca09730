"""PodInfo on the node while the API server is unreachable."""

import asyncio
import signal

import pytest

from agent import labels
from agent.client.podinfo import PodInfoClient, PodInfoState
from agent.client.v1alpha1 import podinfo_pb2
from tests.node.node import Node

pytestmark = pytest.mark.kernel

_PODGATE = podinfo_pb2.CONDITION_SOURCE_PODGATE
_SECONDS = 60


async def next_of(client: PodInfoClient) -> PodInfoState:
    async with asyncio.timeout(_SECONDS):
        state = await asyncio.to_thread(client.next)
    assert state is not None
    return state


def passing(state: PodInfoState) -> podinfo_pb2.PodCondition | None:
    conditions = [one for pod in state.pods for one in pod.conditions]
    return next((one for one in conditions if one.type == labels.PROBES_PASSING), None)


async def test_readiness_is_published_without_the_api_server(
    node: Node,
) -> None:
    await node.start_agent()
    node.create("web")
    sandbox = await node.driver.run_sandbox("web")
    container = await node.driver.start_container(sandbox)
    await node.ready("web")
    await node.saved("web")
    await node.stop_api()

    client = PodInfoClient(f"unix://{node.operator.run_directory}/podinfo/podinfo.sock")
    try:
        state = await next_of(client)
        assert [(pod.pod_uid, pod.pod_name) for pod in state.pods] == [("uid-web", "web")]
        await node.stop_agent(signal.SIGKILL)
        await node.start_agent()
        first = state
        while state.instance_id == first.instance_id or not (said := passing(state)):
            state = await next_of(client)
        assert [pod.pod_uid for pod in state.pods] == ["uid-web"]
        # Its listener closes: only the node notices.
        await node.driver.stop_container(container)
        while said is None or said.status != podinfo_pb2.CONDITION_STATUS_FALSE:
            assert [pod.pod_uid for pod in state.pods] == ["uid-web"]
            state = await next_of(client)
            said = passing(state)
        assert said.source == _PODGATE
        assert node.condition("web", labels.PROBES_PASSING)["status"] == "True"
    finally:
        await asyncio.to_thread(client.close)
