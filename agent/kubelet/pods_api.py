"""The node's pods from the kubelet's pods API (KEP-4188), also without the API server.

Alpha and disabled in 1.36, beta and enabled in 1.37. If the socket is not served, connecting is
retried, and only the API server's pods are used. One stream sends every pod, then an event that
ends the list, then each change.
"""

import asyncio
import pathlib
import random
from typing import Any, Final

import grpc
import structlog

from agent import backoff
from agent.kube.api_pods import KUBELET, ApiPods
from agent.kubelet import kubelet_pb2, pods_api_reading
from agent.logs import Event

log = structlog.get_logger(__name__)

SOCKET: Final = pathlib.Path("/var/lib/kubelet/pods-api/pods-api.sock")

# A stream is opened again after this: its peer may hang.
_STREAM_SECONDS = 600.0
_HEALTHY_SECONDS = 30.0
# A 1.36 kubelet that has just started ends the list first and sends its pods a second later.
_SETTLE_SECONDS = 30.0

_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Go's servers reject a path as a host name.
    ("grpc.default_authority", "localhost"),
)


class KubeletPods:
    """Feeds `ApiPods` with the kubelet's pods."""

    def __init__(
        self,
        source: ApiPods,
        *,
        socket: pathlib.Path = SOCKET,
        jitter: backoff.Jitter = random.random,
        settle_seconds: float = _SETTLE_SECONDS,
    ) -> None:
        """settle_seconds: how long after the end of the list a pod may still be missing in it."""
        self.problem = ""
        """Why the kubelet's pods API is not connected; empty while it is."""
        self.is_connected = False
        self._source = source
        self._socket = socket
        self._settle_seconds = settle_seconds
        self._pods: set[str] = set()
        self._backoff = backoff.Backoff(base_seconds=1.0, cap_seconds=60.0, jitter=jitter)

    async def run(self) -> None:
        """Follow the kubelet until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                async with grpc.aio.insecure_channel(
                    f"unix:{self._socket}", options=_OPTIONS
                ) as channel:
                    await self._follow(channel)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._handle_error(error)
            self.is_connected = False
            self._source.disconnect(KUBELET)
            if loop.time() - started >= _HEALTHY_SECONDS:
                self._backoff.reset()
            await asyncio.sleep(self._backoff.next_seconds())

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        watch = channel.unary_stream(
            "/v1alpha1.Pods/WatchPods",
            request_serializer=kubelet_pb2.WatchPodsRequest.SerializeToString,
            response_deserializer=kubelet_pb2.WatchPodsEvent.FromString,
        )
        # Pods of the previous stream that are missing in this one are deleted.
        missing = set(self._pods)
        settled: asyncio.TimerHandle | None = None
        try:
            async for event in watch(kubelet_pb2.WatchPodsRequest(), timeout=_STREAM_SECONDS):
                self.is_connected = True
                if self.problem:
                    log.info(Event.KUBELET_PODS_API_CONNECTED, socket=str(self._socket))
                    self.problem = ""
                if event.type != kubelet_pb2.INITIAL_SYNC_COMPLETE:
                    missing.discard(self._handle_event(event))
                elif settled is None:
                    loop = asyncio.get_running_loop()
                    settled = loop.call_later(self._settle_seconds, self._forget, missing)
        finally:
            if settled:
                settled.cancel()

    def _handle_event(self, event: Any) -> str:
        """Returns the uid of the pod; empty if it cannot be decoded."""
        try:
            pod = pods_api_reading.read(event.pod)
        except pods_api_reading.PodDecodeError as error:
            log.warning(Event.KUBELET_POD_INVALID, error=str(error))
            return ""
        if event.type == kubelet_pb2.DELETED:
            self._forget({pod.uid})
        elif event.type in (kubelet_pb2.ADDED, kubelet_pb2.MODIFIED):
            self._pods.add(pod.uid)
            self._source.set_pod(KUBELET, pod)
        return pod.uid

    def _forget(self, uids: set[str]) -> None:
        for uid in uids:
            self._pods.discard(uid)
            self._source.remove_pod(KUBELET, uid)

    def _handle_error(self, error: grpc.aio.AioRpcError) -> None:
        details = " ".join((error.details() or error.code().name).split())
        if not self.problem:
            log.info(
                Event.KUBELET_PODS_API_UNAVAILABLE,
                socket=str(self._socket),
                error=details,
            )
        self.problem = details
