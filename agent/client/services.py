"""Client of service endpoints: which endpoints of each service this node uses.

Needs grpcio and protobuf only. A complete program:

    from agent.client import services

    services.run(lambda state: print(state.rev, len(state.services)))
"""

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence

import grpc

from agent.client import base
from agent.client.v1alpha1 import endpoints_pb2

DEFAULT_TARGET = "unix:///run/podgate/localnet/localnet.sock"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
METHOD = "/podgate.localnet.v1alpha1.Endpoints/Next"


@dataclasses.dataclass(frozen=True)
class ServicesState(base.State):
    """All services at one revision."""

    services: tuple[endpoints_pb2.ServiceEndpoints, ...]
    """Sorted by namespace and name."""
    saved_at: datetime.datetime | None = None
    """When a previous agent saved this state, if the API server has not confirmed it since."""


class ServicesClient(base.StreamClient[ServicesState]):
    """Receives each new state, whole. `cancel` may be called from any thread, the rest from one."""

    SUBJECT = "the service endpoints of this node"
    DEFAULT_TARGET = DEFAULT_TARGET

    def _add_methods(self) -> None:
        self._next = self._channel.unary_stream(
            METHOD,
            request_serializer=endpoints_pb2.NextFilter.SerializeToString,
            response_deserializer=endpoints_pb2.NextItem.FromString,
        )

    def request(self, timeout_seconds: float) -> ServicesState | None:
        """Wait once for a state other than the last; None if there was none. Raises
        `StreamError`."""
        return self._receive(timeout_seconds)

    def _receive(self, timeout_seconds: float) -> ServicesState | None:
        position = endpoints_pb2.NextFilter(instance_id=self.instance_id, rev=self.rev)
        call = self._start(self._next(position, timeout=timeout_seconds))
        try:
            return self._advance(_assemble(call))
        except grpc.RpcError:
            if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return None
            raise self._stream_error(call) from None
        finally:
            call.cancel()
            # grpcio may deadlock when the interpreter exits while a call object exists.
            self._call = None


def run(handler: Callable[[ServicesState], object], arguments: Sequence[str] | None = None) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM; see `base.run`."""
    base.run(ServicesClient, handler, arguments)


def _assemble(items: Iterator[endpoints_pb2.NextItem]) -> ServicesState:
    """Raises `StreamError` for anything other than a header, services and the end."""
    services: list[endpoints_pb2.ServiceEndpoints] = []
    header: endpoints_pb2.NextItem | None = None
    for item in items:
        kind = item.WhichOneof("item")
        if kind == "next" and header is None:
            header = item
        elif kind == "services" and header is not None:
            services += item.services.items
        elif kind == "end" and header is not None and item.end.service_count == len(services):
            saved_at = header.saved_at.ToDatetime(datetime.UTC)
            return ServicesState(
                header.next.instance_id,
                header.next.rev,
                tuple(services),
                saved_at if header.HasField("saved_at") else None,
            )
        else:
            break
    raise base.StreamError("the server's list of services is incomplete", grpc.StatusCode.DATA_LOSS)
