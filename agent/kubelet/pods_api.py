"""The node's pods from the kubelet itself (its pods API, KEP-4188): fresh without the API server.

Alpha in 1.36 and off, beta and on in 1.37; where its socket is not served, it is asked for now and
then, and the API server's word goes alone. One stream tells every pod, then, since 1.37, that these
were all, then each change.
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

log = structlog.get_logger(__name__)

SOCKET: Final = pathlib.Path("/var/lib/kubelet/pods-api/pods-api.sock")

# After so long a stream is opened anew: its other end may hang.
_STREAM_SECONDS = 600.0
_WELL_SECONDS = 30.0

_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Go's servers refuse a path as the name of a host.
    ("grpc.default_authority", "localhost"),
)


class KubeletPods:
    """Feeds a `ApiPods` with what the kubelet has."""

    def __init__(
        self,
        source: ApiPods,
        *,
        socket: pathlib.Path = SOCKET,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        self.problem = ""
        """Why the kubelet's word is not heard now; empty while it is."""
        self.is_connected = False
        self._source = source
        self._socket = socket
        self._pods: set[str] = set()
        self._backoff = backoff.Backoff(base_seconds=1.0, cap_seconds=60.0, jitter=jitter)

    async def run(self) -> None:
        """Follow the kubelet until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
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
            if loop.time() - begun >= _WELL_SECONDS:
                self._backoff.reset()
            await asyncio.sleep(self._backoff.next_seconds())

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        watch = channel.unary_stream(
            "/v1alpha1.Pods/WatchPods",
            request_serializer=kubelet_pb2.WatchPodsRequest.SerializeToString,
            response_deserializer=kubelet_pb2.WatchPodsEvent.FromString,
        )
        # What an earlier stream told and this one does not is gone.
        missing = set(self._pods)
        async for event in watch(kubelet_pb2.WatchPodsRequest(), timeout=_STREAM_SECONDS):
            self.is_connected = True
            if self.problem:
                log.info("the kubelet tells of its pods", socket=str(self._socket))
                self.problem = ""
            if not event.pod:
                self._forget(missing)
                missing = set()
                continue
            missing.discard(self._handle_event(event))

    def _handle_event(self, event: Any) -> str:
        """The uid of the pod; empty when it cannot be read."""
        try:
            pod = pods_api_reading.read(event.pod)
        except pods_api_reading.PodDecodeError as error:
            log.warning("a pod of the kubelet's cannot be read", error=str(error))
            return ""
        if event.type == kubelet_pb2.DELETED:
            self._forget({pod.uid})
        else:
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
                "the kubelet's pods API is not heard; pods come from the API server alone",
                socket=str(self._socket),
                error=details,
            )
        self.problem = details
