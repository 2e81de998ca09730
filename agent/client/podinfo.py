"""Follow what is true of this node's pods; needs nothing but grpcio and protobuf.

A whole client:

    from agent.client import podinfo

    podinfo.run(lambda state: print(state.rev, len(state.pods)))
"""

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc

from agent.client import base, podinfo_pb2

DEFAULT_TARGET: Final = "unix:///run/podgate/podinfo/podinfo.sock"
SERVICE: Final = "podgate.podinfo.v1alpha1.PodInfo"
UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE

# A stream may be silent for as long as nothing changes; a server that hangs must not be waited for
# for ever.
_STREAM_SECONDS: Final = 600.0


class Broken(Exception):
    """The server could not be asked; the message is one sentence. `code`: gRPC's."""

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True)
class State:
    """All that is to be known at one revision."""

    instance_id: int
    rev: int
    pods: tuple[podinfo_pb2.PodConditions, ...]
    """Sorted by namespace, name and uid."""


class Client:
    """Gets each new state, whole. `cancel` may be called from any thread, the rest from one."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        instance_id: int = 0,
        rev: int = 0,
        error_delay_seconds: float = 0.5,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """target: as gRPC writes it, `unix:///path`.

        instance_id, rev: of the state that is known already, to go on from there. Raises
        `ValueError` for numbers that cannot be.
        error_delay_seconds: between tries, half to one and a half times as long.
        on_problem: gets one sentence when asking begins to fail; it goes on by itself.
        """
        base.check_known(instance_id, rev)
        self.instance_id = instance_id
        self.rev = rev
        self._error_delay_seconds = error_delay_seconds
        self._on_problem = on_problem
        self._problem = ""
        self._cancelled = threading.Event()
        self._call: Any = None
        self._channel = base.channel(target)
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

    def __iter__(self) -> Iterator[State]:
        """Each new state, until cancelled."""
        while (state := self.next()) is not None:
            yield state

    def next(self) -> State | None:
        """Wait for a state other than the last; None once cancelled. Never fails."""
        while not self._cancelled.is_set():
            try:
                return self._next()
            except grpc.RpcError as error:
                self._call = None
                self._wait_after(error)
        return None

    def list(self, timeout_seconds: float) -> State:
        """The state that is now. Raises `Broken`."""
        try:
            for told in self._list(podinfo_pb2.ListPodConditionsRequest(), timeout=timeout_seconds):
                return State(told.instance_id, told.rev, tuple(told.pods))
        except grpc.RpcError as error:
            raise _broken(error) from None
        raise Broken("the server told nothing", grpc.StatusCode.DATA_LOSS)

    def get(self, pod_uid: str, timeout_seconds: float) -> podinfo_pb2.PodConditions:
        """One pod, by any of its uids. Raises `Broken`, with NOT_FOUND if there is none."""
        asked = podinfo_pb2.GetPodConditionsRequest(pod_uid=pod_uid)
        try:
            told: podinfo_pb2.GetPodConditionsResponse = self._get(asked, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise _broken(error) from None
        return told.pod

    def cancel(self) -> None:
        """End `next`, for good."""
        self._cancelled.set()
        call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        self.cancel()
        self._channel.close()

    def _next(self) -> State:
        """Raises `grpc.RpcError` when the stream ends, however it does."""
        while True:
            if self._call is None:
                known = podinfo_pb2.WatchPodConditionsRequest(
                    instance_id=self.instance_id, rev=self.rev
                )
                self._call = self._watch(known, timeout=_STREAM_SECONDS)
                if self._cancelled.is_set():
                    self._call.cancel()
            for told in self._call:
                self._problem = ""
                self.instance_id, self.rev = told.instance_id, told.rev
                return State(told.instance_id, told.rev, tuple(told.pods))
            # A server that ends a stream without a fault is asked again.
            self._call = None
            self._cancelled.wait(self._error_delay_seconds)

    def _wait_after(self, error: grpc.RpcError) -> None:
        broken = _broken(error)
        if self._cancelled.is_set() or broken.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return
        if not self._problem:
            self._problem = str(broken)
            self._on_problem(self._problem)
        # All that follow a node's pods lose them at the same moment, and must not come back so.
        self._cancelled.wait(self._error_delay_seconds * (0.5 + random.random()))  # noqa: S311


def _broken(error: grpc.RpcError) -> Broken:
    details = " ".join((error.details() or error.code().name).split())
    return Broken(f"the node's pods cannot be asked for: {details}", error.code())


def run(handler: Callable[[State], object], arguments: Sequence[str] | None = None) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM, as the command line says.

    arguments: those of the process, if None.
    """
    described = "Follows the conditions of this node's pods."
    base.run(described, DEFAULT_TARGET, Client, handler, arguments)
