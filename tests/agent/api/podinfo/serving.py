"""A node whose pods a test creates, served over real sockets."""

import asyncio
import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from agent import labels
from agent.api.podinfo.merge import PodRecord
from agent.api.podinfo.methods import PODINFO
from agent.api.podinfo.publisher import PodsPublisher
from agent.api.podinfo.records import PodRecords
from agent.api.podinfo.server import PodInfoServer
from agent.client.v1alpha1 import podinfo_pb2
from agent.pods.changes import Changes
from agent.pods.conditions import FALSE, TRUE, Conditions
from agent.pods.pod import Pod
from tests import polling

PATIENCE_SECONDS = 30


class Calls:
    """The three methods over one channel, with the messages that the agent has."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.list = channel.unary_stream(
            f"/{PODINFO}/ListPodConditions",
            request_serializer=podinfo_pb2.ListPodConditionsRequest.SerializeToString,
            response_deserializer=podinfo_pb2.ListPodConditionsResponse.FromString,
        )
        self.watch = channel.unary_stream(
            f"/{PODINFO}/WatchPodConditions",
            request_serializer=podinfo_pb2.WatchPodConditionsRequest.SerializeToString,
            response_deserializer=podinfo_pb2.WatchPodConditionsResponse.FromString,
        )
        self.get = channel.unary_unary(
            f"/{PODINFO}/GetPodConditions",
            request_serializer=podinfo_pb2.GetPodConditionsRequest.SerializeToString,
            response_deserializer=podinfo_pb2.GetPodConditionsResponse.FromString,
        )

    async def listed(self) -> podinfo_pb2.ListPodConditionsResponse:
        """The one response of a list."""
        responses = [
            one
            async for one in self.list(
                podinfo_pb2.ListPodConditionsRequest(), timeout=PATIENCE_SECONDS
            )
        ]
        assert len(responses) == 1
        response: podinfo_pb2.ListPodConditionsResponse = responses[0]
        return response

    async def got(self, uid: str) -> podinfo_pb2.GetPodConditionsResponse:
        asked = podinfo_pb2.GetPodConditionsRequest(pod_uid=uid)
        response: podinfo_pb2.GetPodConditionsResponse = await self.get(
            asked, timeout=PATIENCE_SECONDS
        )
        return response

    def watched(self, instance_id: int = 0, rev: int = 0) -> Any:
        asked = podinfo_pb2.WatchPodConditionsRequest(instance_id=instance_id, rev=rev)
        return self.watch(asked, timeout=10 * PATIENCE_SECONDS)


class _Conditions(Conditions):
    """Hints at each change, as the agent does by a subscription."""

    def __init__(self, node: "Node") -> None:
        super().__init__()
        self._node = node

    def set(self, pod: Pod, kind: str, status: str, reason: str, message: str, **more: Any) -> bool:
        is_changed = super().set(pod, kind, status, reason, message, **more)
        if is_changed:
            self._node.change(pod.uid)
        return is_changed


class _Records(PodRecords):
    """A node's, and how many were read."""

    def __init__(self, node: "Node") -> None:
        self.read = 0
        self._node = node
        super().__init__(
            uids=lambda: node.pods,
            pod_of=node.pods.get,
            conditions_of=lambda uid: node.conditions.of(uid),
            addresses_of=lambda uid: node.addresses.get(uid, ()),
            source=None,
        )

    def uids(self) -> list[str]:
        return list(dict.fromkeys((*super().uids(), *self._node.more)))

    def of(self, uid: str) -> PodRecord | None:
        self.read += 1
        return self._node.more.get(uid) or super().of(uid)


class Node:
    """Its pods, and the server that publishes them."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.path = directory / "podinfo" / "podinfo.sock"
        self.pods: dict[str, Pod] = {}
        self.addresses: dict[str, tuple[str, ...]] = {}
        """Confirmed ones, by uid."""
        self.more: dict[str, PodRecord] = {}
        """What API server and kubelet know, by the runtime's uid."""
        self.synced = asyncio.Event()
        self.unready_because = None
        self.changed = Changes()
        self.records = _Records(self)
        self.conditions = _Conditions(self)
        self.publisher = self._new_publisher()
        self.server = self._new_server()
        self.limits: dict[str, float] = {}

    @property
    def unready_because(self) -> str | None:
        return self._unready_because

    @unready_because.setter
    def unready_because(self, reason: str | None) -> None:
        self._unready_because = reason
        if reason is None:
            self.synced.set()
        else:
            self.synced.clear()

    def add(self, name: str, **fields: Any) -> Pod:
        """A pod with both conditions, of uid `uid-NAME`."""
        pod = Pod(uid=f"uid-{name}", namespace="tests", name=name, **fields)
        self.pods[pod.uid] = pod
        self.set(pod, True)
        self.conditions.set(
            pod, labels.ISOLATION_READY, TRUE, "Enforced", "Its gates are attached."
        )
        self.change(pod.uid)
        return pod

    def set(self, pod: Pod, passes: bool, message: str = "") -> None:
        """Set the result of its probes."""
        status = TRUE if passes else FALSE
        reason = "ProbesPassing" if passes else "ProbeFailed"
        self.conditions.set(pod, labels.PROBES_PASSING, status, reason, message)

    def remove(self, pod: Pod) -> None:
        del self.pods[pod.uid]
        self.conditions.forget(pod.uid)
        self.change(pod.uid)

    def change(self, uid: str) -> None:
        """Have a pod read again, as the agent does by a subscription."""
        self.publisher.hint_pod(uid)
        self.changed.mark(uid)

    def _new_publisher(self) -> PodsPublisher:
        return PodsPublisher(
            self.records,
            synced=self.synced,
            unready_because=lambda: self.unready_because,
        )

    def _new_server(self, **limits: Any) -> PodInfoServer:
        return PodInfoServer(
            self.publisher, path=self.path, inner=self.directory / "in" / "grpc.sock", **limits
        )

    @contextlib.asynccontextmanager
    async def serving(self, **limits: Any) -> AsyncIterator[Calls]:
        """One life of the agent. limits: of the server."""
        self.publisher = self._new_publisher()
        self.server = self._new_server(**limits)
        running = [
            asyncio.create_task(self.publisher.run()),
            asyncio.create_task(self.server.run()),
        ]
        try:
            await polling.until("the socket", self.path.exists)
            if self.unready_because is None:
                await self.publisher.is_ready.wait()
            async with self.channel() as channel:
                yield Calls(channel)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def channel(self, *more: tuple[str, int]) -> grpc.aio.Channel:
        """A connection of its own."""
        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
            *more,
        )
        return grpc.aio.insecure_channel(f"unix:{self.path}", options=options)

    def has_watches(self, count: int) -> bool:
        """Whether `count` watches are open."""
        return self.server.watches == count


@contextlib.contextmanager
def directory_for_all() -> Iterator[pathlib.Path]:
    """A short path, as sockets need, that all users may enter."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="podinfo-"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made)


def code_of(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str]:
    return error.code(), error.details() or ""
