"""Client of PodInfo: the conditions of this node's pods. Needs grpcio and protobuf only.

A complete program:

    from podgate_client import podinfo

    podinfo.run(lambda state: print(state.rev, len(state.pods)))
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from . import aio, base
from .v1alpha1 import podinfo_pb2

DEFAULT_TARGET = "unix:///run/podgate/podinfo/podinfo.sock"
SERVICE = "podgate.podinfo.v1alpha1.PodInfo"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED


@dataclasses.dataclass(frozen=True)
class PodInfoState(base.State):
    """All pods of the node at one revision."""

    pods: tuple[podinfo_pb2.PodConditions, ...]
    """Sorted by namespace, name and uid."""

    def by_uid(self) -> dict[str, podinfo_pb2.PodConditions]:
        """Pods by UID, as `diff.Differ` compares them."""
        return {pod.pod_uid: pod for pod in self.pods}


def _state(
    response: podinfo_pb2.ListPodConditionsResponse | podinfo_pb2.WatchPodConditionsResponse,
) -> PodInfoState:
    return PodInfoState(response.instance_id, response.rev, tuple(response.pods))


class _Session:
    """Each response is a state."""

    def request(self, instance_id: int, rev: int) -> podinfo_pb2.WatchPodConditionsRequest:
        return podinfo_pb2.WatchPodConditionsRequest(instance_id=instance_id, rev=rev)

    def read(self, response: podinfo_pb2.WatchPodConditionsResponse) -> PodInfoState:
        return _state(response)


API = base.Api[PodInfoState](
    subject="the conditions of this node's pods",
    default_target=DEFAULT_TARGET,
    method=f"/{SERVICE}/WatchPodConditions",
    response=podinfo_pb2.WatchPodConditionsResponse,
    session=_Session,
    is_followed=True,
)


def _list(channel: Any) -> Any:
    return channel.unary_stream(
        f"/{SERVICE}/ListPodConditions",
        request_serializer=podinfo_pb2.ListPodConditionsRequest.SerializeToString,
        response_deserializer=podinfo_pb2.ListPodConditionsResponse.FromString,
    )


def _get(channel: Any) -> Any:
    return channel.unary_unary(
        f"/{SERVICE}/GetPodConditions",
        request_serializer=podinfo_pb2.GetPodConditionsRequest.SerializeToString,
        response_deserializer=podinfo_pb2.GetPodConditionsResponse.FromString,
    )


class PodInfoClient(base.StreamClient[PodInfoState]):
    """Receives each new state, whole. `cancel` may be called from any thread, the rest from one."""

    API = API

    def list(self, timeout_seconds: float) -> PodInfoState:
        """The current state. Raises `StreamError`."""
        request = podinfo_pb2.ListPodConditionsRequest()
        try:
            for response in _list(self._channel)(request, timeout=timeout_seconds):
                return _state(response)
        except grpc.RpcError as error:
            raise self.API.error(error) from None
        raise self.API.ended()

    def get(self, pod_uid: str, timeout_seconds: float) -> podinfo_pb2.PodConditions:
        """One pod, by any of its uids. Raises `StreamError`, with NOT_FOUND if there is none."""
        request = podinfo_pb2.GetPodConditionsRequest(pod_uid=pod_uid)
        try:
            response: podinfo_pb2.GetPodConditionsResponse = _get(self._channel)(
                request, timeout=timeout_seconds
            )
        except grpc.RpcError as error:
            raise self.API.error(error) from None
        return response.pod


class AsyncPodInfoClient(aio.AsyncStreamClient[PodInfoState]):
    """Receives each new state, whole, on the event loop that creates it."""

    API = API

    async def list(self, timeout_seconds: float) -> PodInfoState:
        """The current state. Raises `StreamError`."""
        request = podinfo_pb2.ListPodConditionsRequest()
        try:
            async for response in _list(self._channel)(request, timeout=timeout_seconds):
                return _state(response)
        except grpc.RpcError as error:
            raise self.API.error(error) from None
        raise self.API.ended()

    async def get(self, pod_uid: str, timeout_seconds: float) -> podinfo_pb2.PodConditions:
        """One pod, by any of its uids. Raises `StreamError`, with NOT_FOUND if there is none."""
        request = podinfo_pb2.GetPodConditionsRequest(pod_uid=pod_uid)
        try:
            response: podinfo_pb2.GetPodConditionsResponse = await _get(self._channel)(
                request, timeout=timeout_seconds
            )
        except grpc.RpcError as error:
            raise self.API.error(error) from None
        return response.pod


def run(handler: Callable[[PodInfoState], object], arguments: Sequence[str] | None = None) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM; see `base.run`."""
    base.run(PodInfoClient, handler, base.parser_of(API), arguments)
