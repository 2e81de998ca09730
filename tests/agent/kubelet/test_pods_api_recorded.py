"""A recorded stream of a kubelet 1.36.2's pods API: its start, one pod's life, and its restart."""

import asyncio
import base64
import pathlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import msgspec
import pytest

from agent.kube.client import ApiClient
from agent.kubelet import kubelet_pb2, pods_api_reading
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kubelet.test_pods_api import Following, serving, until

RECORDING = pathlib.Path(__file__).parent / "recorded" / "watchpods-1.36.2.jsonl"
AT_START = 8


class Message(msgspec.Struct, rename={"content": "message"}):
    """One message of the kubelet, or the error that ended its stream. at: seconds."""

    at: float
    type: int | None = None
    content: str = ""
    error: str = ""


def streams() -> list[list[bytes]]:
    """The messages of the stream before the restart, and of the one after it."""
    found: list[list[bytes]] = [[]]
    for line in RECORDING.read_text(encoding="ascii").splitlines():
        message = msgspec.json.decode(line, type=Message)
        if not message.error:
            found[-1].append(base64.b64decode(message.content))
        elif found[-1]:
            found.append([])
    return found[:2]


class Replay:
    """Serves `sent`, as far as `put`; `end` breaks the stream, as the kubelet's end does."""

    def __init__(self) -> None:
        self._pending: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, messages: list[bytes]) -> None:
        for message in messages:
            self._pending.put_nowait(message)

    def end(self) -> None:
        self._pending.put_nowait(None)

    async def wait_sent(self) -> None:
        """Until all that was put is with the client: it has taken the last message."""
        await until(self._pending.empty)

    async def _watch(
        self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        while (message := await self._pending.get()) is not None:
            yield message
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed)")

    def running(self, path: pathlib.Path) -> AbstractAsyncContextManager[None]:
        return serving(path, grpc.unary_stream_rpc_method_handler(self._watch))


def uid_of(message: bytes) -> str:
    return pods_api_reading.read(kubelet_pb2.WatchPodsEvent.FromString(message).pod).metadata.uid


@pytest.fixture
def socket(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "pods-api.sock"


async def test_pods_live_change_and_end_as_recorded(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    first, _ = streams()
    born, *changes, ended = first[AT_START + 1 :]
    uid = uid_of(born)
    replay = Replay()
    replay.put(first[: AT_START + 1])
    async with replay.running(socket), Following(api, socket).running() as seen:
        await until(lambda: len(seen.pods) == AT_START)
        replay.put([born])
        await until(lambda: uid in seen.pods)
        replay.put(changes)
        running = pods_api_reading.read(kubelet_pb2.WatchPodsEvent.FromString(changes[-1]).pod)
        await until(lambda: seen.source.get(uid) == running)
        assert len(seen.pods) == AT_START + 1
        replay.put([ended])
        await until(lambda: uid not in seen.pods)
        assert len(seen.pods) == AT_START


async def test_no_pod_is_lost_when_a_restarted_kubelet_ends_its_list_before_it_begins(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    first, (list_end, *added) = streams()
    replay = Replay()
    replay.put(first[: AT_START + 1])
    async with (
        replay.running(socket),
        Following(api, socket, settle_seconds=30).running() as seen,
    ):
        await until(lambda: len(seen.pods) == AT_START)
        replay.end()
        await until(lambda: not seen.kubelet.is_connected)
        replay.put([list_end])
        await until(lambda: seen.kubelet.is_connected)
        assert len(seen.pods) == AT_START
        replay.put(added)
        await replay.wait_sent()
        assert len(seen.pods) == AT_START
        assert {uid_of(message) for message in added} == seen.pods.keys()


async def test_pod_that_ended_during_the_kubelets_restart_is_removed_after_a_while(
    server: ApiServer, api: ApiClient, socket: pathlib.Path
) -> None:
    first, (list_end, *added) = streams()
    replay = Replay()
    replay.put(first[: AT_START + 1])
    async with replay.running(socket), Following(api, socket).running() as seen:
        await until(lambda: len(seen.pods) == AT_START)
        replay.end()
        replay.put([list_end, *added[1:]])
        await until(lambda: uid_of(added[0]) not in seen.pods)
        assert len(seen.pods) == AT_START - 1


def test_podgate_serves_the_released_numbers() -> None:
    numbers = dict(kubelet_pb2.EventType.items())
    assert numbers == {
        "UNSPECIFIED": 0,
        "ADDED": 1,
        "MODIFIED": 2,
        "DELETED": 3,
        "INITIAL_SYNC_COMPLETE": 4,
    }
