"""Streams of the kubelet's pods API that end, and calls that gRPC does not end."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import structlog.testing

from agent.kube.api_pods import ApiPods
from agent.kube.client import ApiClient
from agent.kubelet import kubelet_pb2
from agent.kubelet.pods_api import KubeletPods
from agent.logs import Event
from agent.pods.pod_modes import PodModes
from bpf.verdicts import Mode
from tests.agent.kube.apiserver import pod
from tests.agent.kubelet.test_pods_api import encoded

pytestmark = pytest.mark.looptime

_ADDED = kubelet_pb2.WatchPodsEvent(type=kubelet_pb2.ADDED, pod=encoded(pod("a")))
_MODIFIED = kubelet_pb2.WatchPodsEvent(type=kubelet_pb2.MODIFIED, pod=encoded(pod("a")))
_LISTED = kubelet_pb2.WatchPodsEvent(type=kubelet_pb2.INITIAL_SYNC_COMPLETE)


class Channel:
    """In place of gRPC's: its stream sends some events, and none of its calls ends."""

    def __init__(self, *events: Any, code: grpc.StatusCode | None = None) -> None:
        """code: with what the stream ends after the events."""
        self.requested: list[str] = []
        """Uids of pods."""
        self._events = events
        self._code = code

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def unary_stream(self, path: str, **_: object) -> Callable[..., AsyncIterator[Any]]:
        async def stream(*_: object, **options: object) -> AsyncIterator[Any]:
            for event in self._events:
                yield event
            if self._code:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(self._code, nothing, nothing, "it\nends")
            await asyncio.Event().wait()

        return stream

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(request: Any, **options: object) -> None:
            self.requested.append(request.podUID)
            await asyncio.Event().wait()

        return call


async def connections(
    monkeypatch: pytest.MonkeyPatch, api: ApiClient, seconds: float, *events: Any
) -> tuple[int, str]:
    """How many connections it opens within this time, and its problem at the end."""
    opened = []

    def open_channel(*_: object, **options: object) -> Channel:
        opened.append(Channel(*events))
        return opened[-1]

    monkeypatch.setattr(grpc.aio, "insecure_channel", open_channel)
    source = ApiPods(api, node_name="node1", modes=PodModes(Mode.AUDIT))
    kubelet = KubeletPods(source, socket=pathlib.Path("/nowhere"), jitter=lambda: 0.0)
    running = asyncio.create_task(kubelet.run())
    await asyncio.sleep(seconds)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return len(opened), kubelet.problem


async def test_stream_without_a_list_is_opened_again_and_reported(
    monkeypatch: pytest.MonkeyPatch, api: ApiClient
) -> None:
    problem = "no list of pods within 30 s"
    assert await connections(monkeypatch, api, 30.1, _ADDED) == (1, problem)
    assert await connections(monkeypatch, api, 35, _ADDED) == (2, "")


async def test_stream_that_outlasts_its_deadline_is_opened_again(
    monkeypatch: pytest.MonkeyPatch, api: ApiClient
) -> None:
    assert await connections(monkeypatch, api, 590, _LISTED) == (1, "")
    assert await connections(monkeypatch, api, 610, _LISTED) == (2, "")


async def test_connection_with_a_request_that_outlasts_its_deadline_is_opened_again(
    monkeypatch: pytest.MonkeyPatch, api: ApiClient
) -> None:
    events, problem = (_ADDED, _LISTED, _MODIFIED), "gRPC ended no request for a pod in time"
    assert await connections(monkeypatch, api, 8.1, *events) == (1, problem)
    assert await connections(monkeypatch, api, 12, *events) == (2, "")


async def following(
    monkeypatch: pytest.MonkeyPatch, api: ApiClient, seconds: float, *channels: Channel
) -> tuple[list[float], KubeletPods]:
    """When it opens each connection within this time; after those given the last one again."""
    loop = asyncio.get_running_loop()
    started, times = loop.time(), []

    def open_channel(*_: object, **options: object) -> Channel:
        times.append(round(loop.time() - started, 1))
        return channels[min(len(times), len(channels)) - 1]

    monkeypatch.setattr(grpc.aio, "insecure_channel", open_channel)
    source = ApiPods(api, node_name="node1", modes=PodModes(Mode.AUDIT))
    kubelet = KubeletPods(source, socket=pathlib.Path("/nowhere"), jitter=lambda: 0.0)
    running = asyncio.create_task(kubelet.run())
    await asyncio.sleep(seconds)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return times, kubelet


@pytest.mark.parametrize(
    ("code", "problem", "times"),
    [
        (grpc.StatusCode.UNAVAILABLE, "it ends", [0, 0.5, 1.5, 3.5, 7.5, 12.5, 17.5]),
        # It serves, and is about to have pods.
        (grpc.StatusCode.FAILED_PRECONDITION, "it ends", [0.5 * number for number in range(39)]),
    ],
)
async def test_kubelet_that_is_away_is_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
    api: ApiClient,
    code: grpc.StatusCode,
    problem: str,
    times: list[float],
) -> None:
    with structlog.testing.capture_logs() as lines:
        found, kubelet = await following(monkeypatch, api, 19.3, Channel(code=code))
    assert (found, kubelet.problem) == (times, problem)
    assert kubelet.answered.is_set()
    assert [line["event"] for line in lines] == [Event.KUBELET_PODS_API_UNAVAILABLE]


async def test_kubelet_that_is_back_is_no_problem(
    monkeypatch: pytest.MonkeyPatch, api: ApiClient
) -> None:
    away, back = Channel(code=grpc.StatusCode.UNAVAILABLE), Channel(_LISTED)
    with structlog.testing.capture_logs() as lines:
        _, kubelet = await following(monkeypatch, api, 5, away, back)
    assert (kubelet.problem, kubelet.is_listed) == ("", True)
    assert [line["event"] for line in lines] == [
        Event.KUBELET_PODS_API_UNAVAILABLE,
        Event.KUBELET_PODS_API_CONNECTED,
    ]


async def test_stream_whose_time_is_up_is_no_problem(
    monkeypatch: pytest.MonkeyPatch, api: ApiClient
) -> None:
    ended = Channel(_ADDED, _LISTED, code=grpc.StatusCode.DEADLINE_EXCEEDED)
    with structlog.testing.capture_logs() as lines:
        times, kubelet = await following(monkeypatch, api, 1, ended, Channel(_LISTED))
    assert (times, kubelet.problem, lines) == ([0, 0.5], "", [])


async def test_first_list_is_awaited_for_some_seconds(
    monkeypatch: pytest.MonkeyPatch, api: ApiClient
) -> None:
    _, kubelet = await following(monkeypatch, api, 4.9, Channel())
    assert not kubelet.answered.is_set()
    _, kubelet = await following(monkeypatch, api, 5.1, Channel())
    assert kubelet.answered.is_set()
    _, kubelet = await following(monkeypatch, api, 0.1, Channel(_LISTED))
    assert kubelet.answered.is_set()


async def test_pods_that_changed_before_the_stream_ended_are_not_requested_again(
    monkeypatch: pytest.MonkeyPatch, api: ApiClient
) -> None:
    """The next stream begins with the newest of each."""
    ended = Channel(_ADDED, _LISTED, _MODIFIED, code=grpc.StatusCode.UNAVAILABLE)
    for changes, requested in ([], []), ([_MODIFIED], ["uid-a"]):
        following_one = Channel(_ADDED, _LISTED, *changes)
        await following(monkeypatch, api, 4, ended, following_one)
        assert (ended.requested, following_one.requested) == ([], requested)
