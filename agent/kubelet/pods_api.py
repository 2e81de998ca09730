"""The node's pods from the kubelet's pods API (KEP-4188), also without the API server.

Alpha and disabled in 1.36, beta and enabled in 1.37. If the socket is not served, connecting is
retried, and only the API server's pods are used. One stream sends every pod, then an event that
ends the list, then each change.

gRPC may lose a request, and may not end a call at its deadline (agent/cri/connection.py). So
deadlines are the event loop's as well, and a connection that misses one is replaced.
"""

import asyncio
import contextlib
import datetime
import pathlib
import random
from typing import Any, Final

import grpc
import structlog

from agent import backoff
from agent.kube import pod_reports
from agent.kube.node_pods import NodePods
from agent.kube.objects import ApiPod, WholePod
from agent.kube.pod_reports import KUBELET
from agent.kubelet import kubelet_pb2, pods_api_reading
from agent.logs import Event

log = structlog.get_logger(__name__)

SOCKET: Final = pathlib.Path("/var/lib/kubelet/pods-api/pods-api.sock")

# A stream is opened again after this: its peer may hang.
_STREAM_SECONDS = 600.0
_HEALTHY_SECONDS = 30.0
# A 1.36 kubelet that has just started ends the list first and sends its pods a second later; one of
# 1.37 reports Ready as False until it has computed the pod's status.
_SETTLE_SECONDS = 30.0
# A kubelet that serves responds within milliseconds, with all of its pods.
_FIRST_RESPONSE_SECONDS = 5.0
_LIST_SECONDS = 30.0
_GET_SECONDS = 5.0
# After its deadline, for gRPC to end a call.
_STUCK_SECONDS = 2.0
# After a change of a pod. Changes that the kubelet sends in the wrong order lie microseconds apart.
_AGAIN_SECONDS = 1.0
# Twice this after the API server has deleted a pod, its end is confirmed with the kubelet.
_CONFIRM_SECONDS = 5.0
# A connection to this node: a kubelet that was away for long is followed soon.
_MAX_RETRY_SECONDS = 10.0

_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Go's servers reject a path as a host name.
    ("grpc.default_authority", "localhost"),
)


class _StuckError(Exception):
    """No response in time, which gRPC does not report; a part of a sentence."""


class KubeletPods:
    """Feeds `NodePods` with the kubelet's pods."""

    def __init__(
        self,
        source: NodePods,
        *,
        socket: pathlib.Path = SOCKET,
        jitter: backoff.Jitter = random.random,
        settle_seconds: float = _SETTLE_SECONDS,
        confirm_seconds: float = _CONFIRM_SECONDS,
        again_seconds: float = _AGAIN_SECONDS,
        keeps_whole: bool = False,
    ) -> None:
        """settle_seconds: how long after the end of the list a pod may still be missing in it, and
        its status be one that the kubelet has not verified; confirm_seconds: between requests for
        pods that only the kubelet has; again_seconds: after its change a pod is requested again;
        keeps_whole: whether `ApiPod.whole` is wanted."""
        self.problem = ""
        """Why the kubelet's pods API is not connected; empty while it is."""
        self.is_connected = False
        self.answered = asyncio.Event()
        """Set once the first list has ended, or cannot be had now."""
        self._source = source
        self._socket = socket
        self._settle_seconds = settle_seconds
        self._confirm_seconds = confirm_seconds
        self._again_seconds = again_seconds
        self._keeps_whole = keeps_whole
        self._unverified: dict[str, ApiPod] = {}
        """Pods of the open stream as the kubelet sent them, until they count as they are."""
        self._is_settled = False
        self.is_listed = False
        """Whether the open stream has ended its list."""
        self._is_stuck = False
        """Whether gRPC did not end a call of the open connection."""
        self._opened = datetime.datetime.now(datetime.UTC)
        """When the open stream was."""
        self._changed: set[str] = set()
        """Pods to be requested again."""
        self._has_changed = asyncio.Event()
        self._requested = ""
        """The pod that is requested, until it changes or is removed."""
        self._limit = asyncio.timeout(None)
        """Of the open stream."""
        self._backoff = backoff.Backoff(
            base_seconds=1.0, cap_seconds=_MAX_RETRY_SECONDS, jitter=jitter
        )

    async def run(self) -> None:
        """Follow the kubelet until cancelled."""
        loop = asyncio.get_running_loop()
        first_response = loop.call_later(_FIRST_RESPONSE_SECONDS, self.answered.set)
        try:
            while True:
                started = loop.time()
                try:
                    async with grpc.aio.insecure_channel(
                        f"unix:{self._socket}", options=_OPTIONS
                    ) as channel:
                        await self._follow(channel)
                except grpc.aio.AioRpcError as error:
                    self._handle_error(error)
                except _StuckError as error:
                    self._set_problem(str(error))
                self.answered.set()
                self.is_connected = False
                self._source.disconnect_kubelet()
                if loop.time() - started >= _HEALTHY_SECONDS:
                    self._backoff.reset()
                await asyncio.sleep(self._backoff.next_seconds())
        finally:
            first_response.cancel()

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """Raises the `AioRpcError` with which the stream ends, if it has one, and `_StuckError`."""
        error: grpc.aio.AioRpcError | _StuckError | None = None
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._confirm(channel), name="end of the kubelet's pods"),
                group.create_task(self._request_changed(channel), name="status of changed pods"),
            ]
            # A group that an error ends loses a cancellation until its tasks have ended (Python
            # before 3.13, gh-116720).
            try:
                await self._read(channel)
            except (grpc.aio.AioRpcError, _StuckError) as ended:
                error = ended
            for task in tasks:
                task.cancel()
        if error is not None:
            raise error

    async def _request_changed(self, channel: grpc.aio.Channel) -> None:
        """Request each pod again after it has changed.

        The kubelet sends a status after it has released the lock under which it was set (1.36,
        SetContainerReadiness in pkg/kubelet/status/status_manager.go). So of two changes at the
        same time the older one may be sent last, and GetPod has the newer one.
        """
        get = _get_pod(channel)
        while True:
            await self._has_changed.wait()
            await asyncio.sleep(self._again_seconds)
            self._has_changed.clear()
            for uid in sorted(self._changed):
                if uid not in self._changed:
                    continue  # deleted since
                self._changed.remove(uid)
                self._requested = uid
                with contextlib.suppress(grpc.aio.AioRpcError):
                    response = await self._get(get, uid)
                    if self._requested == uid and (pod := self._read_pod(response.pod)):
                        self._set(pod)
            self._requested = ""

    async def _confirm(self, channel: grpc.aio.Channel) -> None:
        """Remove pods that the open stream has sent and the kubelet no longer has.

        The kubelet sends DELETED when a pod has terminated, and lists the pod until the API server
        has deleted it (1.36, OnPodRemoved in pkg/kubelet/status/status_manager.go, WatchPods in
        pkg/kubelet/apis/pods/server.go). A stream that opens in between never ends such a pod.
        """
        get = _get_pod(channel)
        missing: set[str] = set()
        while True:
            await asyncio.sleep(self._confirm_seconds)
            before, missing = missing, set()
            for uid in sorted(self._source.only_of_kubelet):
                try:
                    await self._get(get, uid)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.NOT_FOUND:
                        missing.add(uid)
            # Twice: one that has just started has no pods yet, but then this stream has ended.
            for uid in missing & before & self._source.only_of_kubelet:
                self._remove(uid)

    async def _get(self, get: Any, uid: str) -> Any:
        """Raises `AioRpcError`. A call that gRPC does not end ends the stream, and with it this
        task: its connection is replaced."""
        try:
            async with asyncio.timeout(_GET_SECONDS + _STUCK_SECONDS):
                return await get(kubelet_pb2.GetPodRequest(podUID=uid), timeout=_GET_SECONDS)
        except TimeoutError:
            self._is_stuck = True
            self._limit.reschedule(asyncio.get_running_loop().time())
            return await asyncio.Event().wait()

    async def _read(self, channel: grpc.aio.Channel) -> None:
        """Raises `AioRpcError` and `_StuckError`."""
        self._is_stuck = self.is_listed = False
        try:
            async with asyncio.timeout(_LIST_SECONDS) as self._limit:
                await self._read_stream(channel)
        except TimeoutError:
            if self._is_stuck:
                raise _StuckError("gRPC ended no request for a pod in time") from None
            if not self.is_listed:
                raise _StuckError(f"no list of pods within {_LIST_SECONDS:.0f} s") from None

    async def _read_stream(self, channel: grpc.aio.Channel) -> None:
        watch = channel.unary_stream(
            "/v1alpha1.Pods/WatchPods",
            request_serializer=kubelet_pb2.WatchPodsRequest.SerializeToString,
            response_deserializer=kubelet_pb2.WatchPodsEvent.FromString,
        )
        loop = asyncio.get_running_loop()
        self._opened = datetime.datetime.now(datetime.UTC)
        self._unverified.clear()
        self._changed.clear()
        self._is_settled = False
        settled: asyncio.TimerHandle | None = None
        try:
            async for event in watch(kubelet_pb2.WatchPodsRequest(), timeout=_STREAM_SECONDS):
                self.is_connected = True
                if self.problem:
                    log.info(Event.KUBELET_PODS_API_CONNECTED, socket=str(self._socket))
                    self.problem = ""
                if event.type != kubelet_pb2.INITIAL_SYNC_COMPLETE:
                    self._handle_event(event)
                elif settled is None:
                    self.is_listed = True
                    self._limit.reschedule(loop.time() + _STREAM_SECONDS + _STUCK_SECONDS)
                    self.answered.set()
                    settled = loop.call_later(self._settle_seconds, self._settle)
        finally:
            if settled:
                settled.cancel()

    def _handle_event(self, event: Any) -> None:
        pod = self._read_pod(event.pod)
        if pod is None:
            return
        if event.type == kubelet_pb2.DELETED:
            self._remove(pod.uid)
        elif event.type in (kubelet_pb2.ADDED, kubelet_pb2.MODIFIED):
            if self._requested == pod.uid:
                self._requested = ""
            self._set(pod)
            if self.is_listed or event.type == kubelet_pb2.MODIFIED:
                self._changed.add(pod.uid)
                self._has_changed.set()

    def _read_pod(self, content: bytes) -> ApiPod | None:
        try:
            pod = pods_api_reading.read(content)
        except pods_api_reading.PodDecodeError as error:
            log.warning(Event.KUBELET_POD_INVALID, error=str(error))
            return None
        if self._keeps_whole:
            pod.keep_whole(WholePod(content, is_json=False))
        return pod

    def _set(self, pod: ApiPod) -> None:
        if not self._is_settled:
            self._unverified[pod.uid] = pod
            previous = self._source.reports(pod.uid)
            pod = pod_reports.without_unverified(pod, previous, self._opened)
        self._source.set_pod(KUBELET, pod)

    def _remove(self, uid: str) -> None:
        self._unverified.pop(uid, None)
        self._changed.discard(uid)
        if self._requested == uid:
            self._requested = ""
        self._source.remove_pod(KUBELET, uid)

    def _settle(self) -> None:
        """The stream is complete, and all that it has sent counts."""
        self._is_settled = True
        for pod in self._unverified.values():
            self._source.set_pod(KUBELET, pod)
        self._unverified.clear()
        self._source.complete_kubelet_list()

    def _handle_error(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            # It serves, and waits for its own sources of pods.
            self._backoff.reset()
        self._set_problem(" ".join((error.details() or error.code().name).split()))

    def _set_problem(self, problem: str) -> None:
        if not self.problem:
            log.info(
                Event.KUBELET_PODS_API_UNAVAILABLE,
                socket=str(self._socket),
                error=problem,
            )
        self.problem = problem


def _get_pod(channel: grpc.aio.Channel) -> Any:
    """The call that returns one pod, or fails with NOT_FOUND."""
    return channel.unary_unary(
        "/v1alpha1.Pods/GetPod",
        request_serializer=kubelet_pb2.GetPodRequest.SerializeToString,
        response_deserializer=kubelet_pb2.GetPodResponse.FromString,
    )
