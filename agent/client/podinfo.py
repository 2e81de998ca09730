"""Client of PodInfo: the conditions of this node's pods. Needs grpcio and protobuf only.

A complete program:

    from agent.client import podinfo

    podinfo.run(lambda state: print(state.rev, len(state.pods)))
"""

import dataclasses
from collections.abc import Callable, Sequence

import grpc

from agent.client import base
from agent.client.v1alpha1 import podinfo_pb2

DEFAULT_TARGET = "unix:///run/podgate/podinfo/podinfo.sock"
SERVICE = "podgate.podinfo.v1alpha1.PodInfo"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED


@dataclasses.dataclass(frozen=True)
class PodInfoState(base.State):
    """All pods of the node at one revision."""

    pods: tuple[podinfo_pb2.PodConditions, ...]
    """Sorted by namespace, name and uid."""


class PodInfoClient(base.StreamClient[PodInfoState]):
    """Receives each new state, whole. `cancel` may be called from any thread, the rest from one."""

    SUBJECT = "the conditions of this node's pods"
    DEFAULT_TARGET = DEFAULT_TARGET

    def _add_methods(self) -> None:
        self._watch = self._channel.unary_stream(
            f"/{SERVICE}/WatchPodConditions",
            request_serializer=podinfo_pb2.WatchPodConditionsRequest.SerializeToString,
            response_deserializer=podinfo_pb2.WatchPodConditionsResponse.FromString,
        )
        self._list = self._channel.unary_stream(
            f"/{SERVICE}/ListPodConditions",
            request_serializer=podinfo_pb2.ListPodConditionsRequest.SerializeToString,
            response_deserializer=podinfo_pb2.ListPodConditionsResponse.FromString,
        )
        self._get = self._channel.unary_unary(
            f"/{SERVICE}/GetPodConditions",
            request_serializer=podinfo_pb2.GetPodConditionsRequest.SerializeToString,
            response_deserializer=podinfo_pb2.GetPodConditionsResponse.FromString,
        )

    def list(self, timeout_seconds: float) -> PodInfoState:
        """The current state. Raises `StreamError`."""
        request = podinfo_pb2.ListPodConditionsRequest()
        try:
            for response in self._list(request, timeout=timeout_seconds):
                return _state(response)
        except grpc.RpcError as error:
            raise self._stream_error(error) from None
        raise base.StreamError("the server sent no response to a list", grpc.StatusCode.DATA_LOSS)

    def get(self, pod_uid: str, timeout_seconds: float) -> podinfo_pb2.PodConditions:
        """One pod, by any of its uids. Raises `StreamError`, with NOT_FOUND if there is none."""
        request = podinfo_pb2.GetPodConditionsRequest(pod_uid=pod_uid)
        try:
            response: podinfo_pb2.GetPodConditionsResponse = self._get(
                request, timeout=timeout_seconds
            )
        except grpc.RpcError as error:
            raise self._stream_error(error) from None
        return response.pod

    def _receive(self, timeout_seconds: float) -> PodInfoState | None:
        if self._call is None:
            request = podinfo_pb2.WatchPodConditionsRequest(
                instance_id=self.instance_id, rev=self.rev
            )
            self._start(self._watch(request, timeout=timeout_seconds))
        try:
            for response in self._call:
                return self._advance(_state(response))
        except grpc.RpcError as error:
            self._call = None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return None
            raise self._stream_error(error) from None
        # The server ended the stream without an error.
        self._call = None
        self._cancelled.wait(self._error_delay_seconds)
        return None


def _state(
    response: podinfo_pb2.ListPodConditionsResponse | podinfo_pb2.WatchPodConditionsResponse,
) -> PodInfoState:
    return PodInfoState(response.instance_id, response.rev, tuple(response.pods))


def run(handler: Callable[[PodInfoState], object], arguments: Sequence[str] | None = None) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM; see `base.run`."""
    base.run(PodInfoClient, handler, arguments)
