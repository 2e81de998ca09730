"""Calls of the kubelet's pods API that get no response, and that gRPC does not end."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from agent.kube.api_pods import ApiPods
from agent.kube.client import ApiClient
from agent.kubelet import kubelet_pb2
from agent.kubelet.pods_api import KubeletPods
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

    def __init__(self, *events: Any) -> None:
        self._events = events

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def unary_stream(self, path: str, **_: object) -> Callable[..., AsyncIterator[Any]]:
        async def stream(*_: object, **options: object) -> AsyncIterator[Any]:
            for event in self._events:
                yield event
            await asyncio.Event().wait()

        return stream

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(*_: object, **options: object) -> None:
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
