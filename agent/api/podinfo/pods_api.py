"""The kubelet's pods API (v1alpha1.Pods, KEP-4188), served from podgate's pods.

For its clients on nodes whose kubelet has none. As there, it is for root alone.
"""

import asyncio
import pathlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from agent.api.podinfo import pod_objects
from agent.api.podinfo.publisher import Entry, Snapshot, Telling
from agent.api.podinfo.server import OPTIONS, Asker, bind, not_ready
from agent.backoff import Bucket
from agent.kubelet import kubelet_pb2

log = structlog.get_logger(__name__)

SERVICE: Final = "v1alpha1.Pods"

# As the kubelet's own (pkg/kubelet/apis/pods/server.go).
_CALLS_PER_SECOND: Final = 100.0
_BURST: Final = 10
_STOP_SECONDS: Final = 0.5


class PodsApi:
    """Serves what a `Telling` of `PodObjects` has."""

    def __init__(self, telling: Telling, path: pathlib.Path) -> None:
        self._telling = telling
        self._path = path
        self._bucket = Bucket(per_second=_CALLS_PER_SECOND, burst=_BURST)

    async def run(self) -> None:
        """Serve until cancelled. Raises `DoorError`."""
        server = grpc.aio.server(options=OPTIONS)
        methods = {
            "ListPods": grpc.unary_unary_rpc_method_handler(self._list),
            "GetPod": grpc.unary_unary_rpc_method_handler(self._get),
            "WatchPods": grpc.unary_stream_rpc_method_handler(self._watch),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        bind(server, self._path)
        await server.start()
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop(_STOP_SECONDS)

    async def _list(self, request: bytes, context: Asker) -> bytes:
        return (await self._let_in(context)).everything

    async def _get(self, request: bytes, context: Asker) -> bytes:
        snapshot = await self._let_in(context)
        try:
            asked = kubelet_pb2.GetPodRequest.FromString(request)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no GetPodRequest")
        found = snapshot.one(asked.podUID)
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this node has no pod of that uid")
        return found

    async def _watch(self, request: bytes, context: Asker) -> AsyncIterator[bytes]:
        snapshot = await self._let_in(context)
        told: dict[str, Entry] = {}
        for event in _events(told, snapshot):
            yield event
        yield _event(kubelet_pb2.INITIAL_SYNC_COMPLETE)
        while True:
            # Who reads slowly gets what has become of each pod, and not what was between.
            snapshot = await self._telling.newer(snapshot.rev)
            for event in _events(told, snapshot):
                yield event

    async def _let_in(self, context: Asker) -> Snapshot:
        if self._bucket.seconds_until_next() > 0:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "asked too often; try again in a second"
            )
        self._bucket.take()
        return self._telling.snapshot or await not_ready(self._telling, context)


def _events(told: dict[str, Entry], snapshot: Snapshot) -> list[bytes]:
    """What `told` lacks of the snapshot; brings it up to date."""
    found = {entry.uids[0]: entry for entry in snapshot.entries if entry.uids}
    gone = told.keys() - found.keys()
    events = [_event(kubelet_pb2.DELETED, told.pop(uid)) for uid in gone]
    for uid, entry in found.items():
        before = told.get(uid)
        if before != entry:
            kind = kubelet_pb2.MODIFIED if before else kubelet_pb2.ADDED
            events.append(_event(kind, entry))
            told[uid] = entry
    return events


def _event(kind: Any, entry: Entry | None = None) -> bytes:
    pod = pod_objects.pod_of(entry) if entry else b""
    return bytes(kubelet_pb2.WatchPodsEvent(type=kind, pod=pod).SerializeToString())
