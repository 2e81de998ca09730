"""The kubelet's pods API (v1alpha1.Pods, KEP-4188), served from podgate's pods.

For its clients on nodes whose kubelet has none. As with the kubelet, only root may use it; limits,
order and messages are those of pkg/kubelet/apis/pods/server.go and pkg/kubelet/apis/grpc, and as
there a watch has no rate limit.
"""

import asyncio
import collections
import contextlib
import pathlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from agent.api import call_status, server
from agent.api.podinfo.methods import GET_POD, LIST_PODS, PODS, WATCH_PODS
from agent.api.podinfo.pod_objects import PodObject, PodObjects
from agent.api.server import RequestContext
from agent.backoff import Bucket
from agent.kubelet import kubelet_pb2
from agent.pods.changes import Changes, Subscription

_CALLS_PER_SECOND = 100.0
_BURST = 10
# A pod is encoded in 0.1 to 0.3 ms; probes and gates run in between.
_PODS_AT_ONCE = 16
# A pod changes several times in a row.
_SETTLE_SECONDS = 0.005


class PodsApiServer:
    """Serves the node's pods to root."""

    def __init__(
        self,
        objects: PodObjects,
        path: pathlib.Path,
        *,
        changes: Changes,
        synced: asyncio.Event,
        unready_because: Callable[[], str | None],
        calls_per_second: float = _CALLS_PER_SECOND,
        listening: socket.socket | None = None,
    ) -> None:
        """changes: of the objects; synced: set once these are all pods of the node;
        unready_because: why they are not yet; calls_per_second: of lists and single pods;
        listening: at `path` already, closed by this."""
        self.requests = collections.Counter[tuple[str, str]]()
        """Requests that have ended, by method and status."""
        self._objects = objects
        self._path = path
        self._listening = listening
        self._changes = changes
        self._synced = synced
        self._unready_because = unready_because
        self._bucket = Bucket(per_second=calls_per_second, burst=_BURST)

    async def run(self) -> None:
        """Serve until cancelled. Raises `ListenError`."""
        methods = {
            LIST_PODS: grpc.unary_unary_rpc_method_handler(self._list),
            GET_POD: grpc.unary_unary_rpc_method_handler(self._get),
            WATCH_PODS: grpc.unary_stream_rpc_method_handler(self._watch),
        }
        listening, self._listening = self._listening, None
        async with server.serve_root(PODS, methods, self._path, listening=listening):
            await asyncio.Event().wait()

    async def _list(self, request: bytes, context: RequestContext) -> bytes:
        async with self._counted(LIST_PODS, context):
            await self._limit(context)
            await self._require_synced(context)
            pods = [pod.content async for _, pod in self._all()]
            return bytes(kubelet_pb2.ListPodsResponse(pods=pods).SerializeToString())

    async def _get(self, request: bytes, context: RequestContext) -> bytes:
        async with self._counted(GET_POD, context):
            await self._limit(context)
            await self._require_synced(context)
            uid = (await server.decode(kubelet_pb2.GetPodRequest, request, context)).podUID
            pod = self._objects.find(uid)
            if pod is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"pod with UID {uid} not found")
            return bytes(kubelet_pb2.GetPodResponse(pod=pod.content).SerializeToString())

    async def _watch(self, request: bytes, context: RequestContext) -> AsyncIterator[bytes]:
        async with self._counted(WATCH_PODS, context):
            await self._require_synced(context)
            changed = self._changes.subscribe(Subscription())
            try:
                sent: dict[str, PodObject] = {}
                async for uid, pod in self._all():
                    sent[uid] = pod
                    yield _event(kubelet_pb2.ADDED, pod.content)
                yield _event(kubelet_pb2.INITIAL_SYNC_COMPLETE, b"")
                while True:
                    # A slow reader gets the newest state of each pod, and not those in between.
                    await changed.wait()
                    await asyncio.sleep(_SETTLE_SECONDS)
                    for uid in changed.take():
                        if event := self._change(sent, uid):
                            yield event
            finally:
                self._changes.unsubscribe(changed)

    async def _all(self) -> AsyncIterator[tuple[str, PodObject]]:
        for number, uid in enumerate(self._objects.uids(), start=1):
            if number % _PODS_AT_ONCE == 0:
                await asyncio.sleep(0)
            if pod := self._objects.of(uid):
                yield uid, pod

    def _change(self, sent: dict[str, PodObject], uid: str) -> bytes | None:
        """The event that leads from what was sent of a pod to what it is; updates `sent`."""
        before, pod = sent.get(uid), self._objects.of(uid)
        if pod is None:
            if before is None:
                return None
            del sent[uid]
            return _event(kubelet_pb2.DELETED, before.identity)
        sent[uid] = pod
        if before is None:
            return _event(kubelet_pb2.ADDED, pod.content)
        return None if pod == before else _event(kubelet_pb2.MODIFIED, pod.content)

    def _counted(
        self, method: str, context: RequestContext
    ) -> contextlib.AbstractAsyncContextManager[None]:
        def count(status: str) -> None:
            self.requests[method, status] += 1

        return call_status.counted(context, count)

    async def _limit(self, context: RequestContext) -> None:
        if self._bucket.seconds_until_next() > 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._bucket.take()

    async def _require_synced(self, context: RequestContext) -> None:
        """Ends the call before all pods are known, since no list is ever partial."""
        if not self._synced.is_set():
            reason = self._unready_because() or "the first list is being read"
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the list of this node's pods is not complete: {reason}",
            )


def _event(kind: Any, content: bytes) -> bytes:
    return bytes(kubelet_pb2.WatchPodsEvent(type=kind, pod=content).SerializeToString())
