"""Follow what this node should use of each service; needs nothing but grpcio and protobuf.

A whole client:

    from agent.client import services

    services.run(lambda state: print(state.rev, len(state.services)))
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc

from agent.client import base, endpoints_pb2

DEFAULT_TARGET: Final = "unix:///run/podgate/localnet/localnet.sock"
METHOD: Final = "/podgate.localnet.v1alpha1.Endpoints/Next"

# Nothing may be new for as long as it likes; a server that hangs must not be waited for for ever.
_CALL_SECONDS: Final = 600.0


class Broken(Exception):
    """The server could not be asked, or what it told is not whole; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class State:
    """All that is to be known at one revision."""

    instance_id: int
    rev: int
    services: tuple[endpoints_pb2.ServiceEndpoints, ...]
    """Sorted by namespace and name."""


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
        """target: as gRPC writes it, `unix:///path` or `127.0.0.1:9651`.

        instance_id, rev: of the state that is known already, to go on from there. Raises
        `ValueError` for numbers that cannot be.
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
        self._next = self._channel.unary_stream(
            METHOD,
            request_serializer=endpoints_pb2.NextFilter.SerializeToString,
            response_deserializer=endpoints_pb2.NextItem.FromString,
        )

    def __iter__(self) -> Iterator[State]:
        """Each new state, until cancelled."""
        while (state := self.next()) is not None:
            yield state

    def next(self) -> State | None:
        """Wait for a state other than the last; None once cancelled. Never fails."""
        while not self._cancelled.is_set():
            try:
                state = self.ask(_CALL_SECONDS)
            except Broken as error:
                if not self._cancelled.is_set() and not self._problem:
                    self._problem = str(error)
                    self._on_problem(self._problem)
                self._cancelled.wait(self._error_delay_seconds)
                continue
            self._problem = ""
            if state is not None:
                return state
        return None

    def ask(self, timeout_seconds: float) -> State | None:
        """Wait once for a state other than the last; None if there was none. Raises `Broken`."""
        known = endpoints_pb2.NextFilter(instance_id=self.instance_id, rev=self.rev)
        call = self._next(known, timeout=timeout_seconds)
        self._call = call
        if self._cancelled.is_set():
            call.cancel()
        state = None
        try:
            state = _whole(call)
        except grpc.RpcError:
            if call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Broken(
                    f"the node's service endpoints cannot be asked for: {call.details()}"
                ) from None
        finally:
            call.cancel()
        if state is not None:
            self.instance_id, self.rev = state.instance_id, state.rev
        return state

    def cancel(self) -> None:
        """End `next`, for good."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        self.cancel()
        self._channel.close()


def run(handler: Callable[[State], object], arguments: Sequence[str] | None = None) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM, as the command line says.

    arguments: those of the process, if None.
    """
    described = "Follows the service endpoints of this node."
    base.run(described, DEFAULT_TARGET, Client, handler, arguments)


def _whole(items: Iterator[endpoints_pb2.NextItem]) -> State:
    """Raises `Broken` for anything but a header, services and the end."""
    services: list[endpoints_pb2.ServiceEndpoints] = []
    header: endpoints_pb2.NextFilter | None = None
    for item in items:
        kind = item.WhichOneof("item")
        if kind == "next" and header is None:
            header = item.next
        elif kind == "services" and header is not None:
            services += item.services.items
        elif kind == "end" and header is not None and item.end.service_count == len(services):
            return State(header.instance_id, header.rev, tuple(services))
        else:
            break
    raise Broken("what the server tells of the services is not whole")
