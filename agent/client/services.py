"""Client of service endpoints: which endpoints of each service this node uses.

Needs grpcio and protobuf only. A complete program:

    from podgate_client import services

    services.run(lambda state: print(state.rev, len(state.services)))
"""

import dataclasses
import datetime
from collections.abc import Callable, Sequence

import grpc

from . import aio, base
from .v1alpha1 import endpoints_pb2

DEFAULT_TARGET = "unix:///run/podgate/localnet/localnet.sock"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
METHOD = "/podgate.localnet.v1alpha1.Endpoints/Next"


@dataclasses.dataclass(frozen=True)
class ServicesState(base.State):
    """All services at one revision."""

    services: tuple[endpoints_pb2.ServiceEndpoints, ...]
    """Sorted by namespace and name."""
    saved_at: datetime.datetime | None = None
    """When a previous agent saved this state, if the API server has not confirmed it since."""

    def by_name(self) -> dict[tuple[str, str], endpoints_pb2.ServiceEndpoints]:
        """Services by namespace and name, as `diff.Differ` compares them."""
        return {(service.namespace, service.name): service for service in self.services}


class _Assembly:
    """The state of one call: a header, services and the end."""

    def __init__(self) -> None:
        self._services: list[endpoints_pb2.ServiceEndpoints] = []
        self._header: endpoints_pb2.NextItem | None = None

    def add(self, item: endpoints_pb2.NextItem) -> ServicesState | None:
        """The state, with its last item. Raises `StreamError` for any other order."""
        kind, header = item.WhichOneof("item"), self._header
        if kind == "next" and header is None:
            self._header = item
        elif kind == "services" and header is not None:
            self._services += item.services.items
        elif kind == "end" and header and item.end.service_count == len(self._services):
            saved_at = header.saved_at.ToDatetime(datetime.UTC)
            return ServicesState(
                header.next.instance_id,
                header.next.rev,
                tuple(self._services),
                saved_at if header.HasField("saved_at") else None,
            )
        else:
            raise API.ended()
        return None


def _request(instance_id: int, rev: int) -> endpoints_pb2.NextFilter:
    return endpoints_pb2.NextFilter(instance_id=instance_id, rev=rev)


API = base.Api(
    subject="the service endpoints of this node",
    default_target=DEFAULT_TARGET,
    method=METHOD,
    request=_request,
    response=endpoints_pb2.NextItem,
    reader=lambda: _Assembly().add,
    is_followed=False,
)


class ServicesClient(base.StreamClient[ServicesState]):
    """Receives each new state, whole. `cancel` may be called from any thread, the rest from one."""

    API = API


class AsyncServicesClient(aio.AsyncStreamClient[ServicesState]):
    """Receives each new state, whole, on the event loop that creates it."""

    API = API


def run(handler: Callable[[ServicesState], object], arguments: Sequence[str] | None = None) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM; see `base.run`."""
    base.run(ServicesClient, handler, arguments)
