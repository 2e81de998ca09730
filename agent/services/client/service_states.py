"""States of service endpoints, assembled from streams; without I/O. Needs protobuf only."""

import dataclasses
import datetime

import grpc

from agent.client import base

from .v1alpha1 import endpoints_pb2

SUBJECT = "the service endpoints of this node"

TYPES = {
    "ClusterIP": endpoints_pb2.SERVICE_TYPE_CLUSTER_IP,
    "NodePort": endpoints_pb2.SERVICE_TYPE_NODE_PORT,
    "LoadBalancer": endpoints_pb2.SERVICE_TYPE_LOAD_BALANCER,
    "ExternalName": endpoints_pb2.SERVICE_TYPE_EXTERNAL_NAME,
}
"""By spec.type of a Service."""
FAMILIES = {
    "IPv4": endpoints_pb2.ADDRESS_FAMILY_IPV4,
    "IPv6": endpoints_pb2.ADDRESS_FAMILY_IPV6,
}


@dataclasses.dataclass(frozen=True)
class ServicesState(base.State):
    """All services of a filter at one revision. Messages that did not change since the last state
    are the same objects: do not modify them."""

    services: tuple[endpoints_pb2.ServiceEndpoints, ...]
    """Sorted by namespace and name."""
    saved_at: datetime.datetime | None = None
    """When a previous agent saved this state, if its source has not confirmed it since."""

    def by_name(self) -> dict[tuple[str, str], endpoints_pb2.ServiceEndpoints]:
        """Services by namespace and name, as `diff.Differ` compares them."""
        return {(service.namespace, service.name): service for service in self.services}


class ServicesSession:
    """Requests states with one filter, and applies differences to the last one."""

    def __init__(
        self, requested: endpoints_pb2.NextFilter | None = None, *, accepts_delta: bool = True
    ) -> None:
        """requested: the filter; its position and `accepts_delta` are not used."""
        self._filter = _without_position(requested or endpoints_pb2.NextFilter())
        self._accepts_delta = accepts_delta
        self._last: ServicesState | None = None
        self._is_base_wrong = False
        self._header: endpoints_pb2.NextItem | None = None
        self._received: list[endpoints_pb2.ServiceEndpoints] = []
        self._removed: list[endpoints_pb2.ServiceName] = []

    def request(self, instance_id: int, rev: int) -> endpoints_pb2.NextFilter:
        """As `base.Session`."""
        self._header, self._received, self._removed = None, [], []
        request = endpoints_pb2.NextFilter()
        request.CopyFrom(self._filter)
        if not self._is_base_wrong:
            request.instance_id, request.rev = instance_id, rev
            last = self._last
            has_base = last is not None and (last.instance_id, last.rev) == (instance_id, rev)
            request.accepts_delta = self._accepts_delta and has_base
        return request

    def read(self, item: endpoints_pb2.NextItem) -> ServicesState | None:
        """The state, with its last item. Raises `StreamError` for any other order."""
        kind, header = item.WhichOneof("item"), self._header
        if kind == "next" and header is None:
            self._check_filter(item.next)
            self._header = item
        elif kind == "services" and header is not None:
            self._received += item.services.items
            self._removed += item.services.removed
        elif kind == "end" and header is not None:
            self._last = self._state(header, item.end.service_count)
            self._is_base_wrong = False
            return self._last
        else:
            raise _incomplete()
        return None

    def _state(self, header: endpoints_pb2.NextItem, service_count: int) -> ServicesState:
        services = tuple(self._received)
        if header.is_delta:
            services = self._applied()
        if len(services) != service_count:
            self._is_base_wrong = header.is_delta
            raise _incomplete()
        saved_at = header.saved_at.ToDatetime(datetime.UTC)
        return ServicesState(
            header.next.instance_id,
            header.next.rev,
            services,
            saved_at if header.HasField("saved_at") else None,
        )

    def _applied(self) -> tuple[endpoints_pb2.ServiceEndpoints, ...]:
        """The services of the last state, with the difference."""
        services = self._last.by_name() if self._last else {}
        before = len(services)
        services |= {(service.namespace, service.name): service for service in self._received}
        if len(services) > before:
            services = dict(sorted(services.items()))
        for name in self._removed:
            services.pop((name.namespace, name.name), None)
        return tuple(services.values())

    def _check_filter(self, echoed: endpoints_pb2.NextFilter) -> None:
        """Without a filter a proxy would install services that are another one's."""
        if _without_position(echoed) != self._filter:
            raise base.StreamError(
                f"cannot read {SUBJECT}: the server ignores the filter, since it is older; update "
                "podgate on this node",
                grpc.StatusCode.UNIMPLEMENTED,
            )


def _without_position(requested: endpoints_pb2.NextFilter) -> endpoints_pb2.NextFilter:
    found = endpoints_pb2.NextFilter()
    found.CopyFrom(requested)
    for field in ("instance_id", "rev", "accepts_delta"):
        found.ClearField(field)
    return found


def _incomplete() -> base.StreamError:
    return base.StreamError(
        f"cannot read {SUBJECT}: the response is incomplete", grpc.StatusCode.DATA_LOSS
    )
