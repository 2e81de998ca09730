"""The kubelet's pods API (v1alpha1.Pods, KEP-4188), served from podgate's pods.

For its clients on nodes whose kubelet has none. As with the kubelet, only root may use it.
"""

import asyncio
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from agent.api import server
from agent.api.podinfo import pod_objects
from agent.api.podinfo.publisher import EncodedPod, PodsPublisher, PodsSnapshot
from agent.api.podinfo.server import require_snapshot
from agent.api.server import RequestContext
from agent.backoff import Bucket
from agent.kubelet import kubelet_pb2

SERVICE = "v1alpha1.Pods"

# As the kubelet's own (pkg/kubelet/apis/pods/server.go).
_CALLS_PER_SECOND = 100.0
_BURST = 10


class PodsApiServer:
    """Serves the pods of a publisher that encodes them with `PodsEncoder`."""

    def __init__(self, publisher: PodsPublisher, path: pathlib.Path) -> None:
        self._publisher = publisher
        self._path = path
        self._bucket = Bucket(per_second=_CALLS_PER_SECOND, burst=_BURST)

    async def run(self) -> None:
        """Serve until cancelled. Raises `ListenError`."""
        methods = {
            "ListPods": grpc.unary_unary_rpc_method_handler(self._list),
            "GetPod": grpc.unary_unary_rpc_method_handler(self._get),
            "WatchPods": grpc.unary_stream_rpc_method_handler(self._watch),
        }
        async with server.serve_root(SERVICE, methods, self._path):
            await asyncio.Event().wait()

    async def _list(self, request: bytes, context: RequestContext) -> bytes:
        return (await self._admit(context)).response

    async def _get(self, request: bytes, context: RequestContext) -> bytes:
        snapshot = await self._admit(context)
        decoded = await server.decode(kubelet_pb2.GetPodRequest, request, context)
        response = snapshot.response_of(decoded.podUID)
        if response is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this node has no pod of that uid")
        return response

    async def _watch(self, request: bytes, context: RequestContext) -> AsyncIterator[bytes]:
        snapshot = await self._admit(context)
        sent: dict[str, EncodedPod] = {}
        for event in _events(sent, snapshot):
            yield event
        yield _event(kubelet_pb2.INITIAL_SYNC_COMPLETE)
        while True:
            # A slow reader gets the newest state of each pod, and not those in between.
            snapshot = await self._publisher.wait_newer(self._publisher.instance_id, snapshot.rev)
            for event in _events(sent, snapshot):
                yield event

    async def _admit(self, context: RequestContext) -> PodsSnapshot:
        if self._bucket.seconds_until_next() > 0:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests; try again in a second"
            )
        self._bucket.take()
        return await require_snapshot(self._publisher, context)


def _events(sent: dict[str, EncodedPod], snapshot: PodsSnapshot) -> list[bytes]:
    """The events that lead from `sent` to the snapshot; updates `sent`."""
    current = {pod.uids[0]: pod for pod in snapshot.pods if pod.uids}
    removed = sent.keys() - current.keys()
    events = [_event(kubelet_pb2.DELETED, sent.pop(uid)) for uid in removed]
    for uid, pod in current.items():
        before = sent.get(uid)
        if before != pod:
            kind = kubelet_pb2.MODIFIED if before else kubelet_pb2.ADDED
            events.append(_event(kind, pod))
            sent[uid] = pod
    return events


def _event(kind: Any, pod: EncodedPod | None = None) -> bytes:
    content = pod_objects.pod_of(pod) if pod else b""
    return bytes(kubelet_pb2.WatchPodsEvent(type=kind, pod=content).SerializeToString())
