"""Output of `podgate services`."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import json_format

from agent.listing import full_name
from agent.operate.cli.output import Column, Screen, Signal
from agent.services.client.services import ServicesState
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

_MAX_ENDPOINTS = 6
_MAPS = ("labels", "annotations")


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceRow:
    """One port of one service; internal, external: its endpoints for such connections; unused: the
    others, if they were requested."""

    service: str
    type: str
    port: str
    addresses: list[str]
    internal: list[str]
    external: list[str]
    unused: list[str]
    labels: list[str]
    annotations: list[str]


_COLUMNS: tuple[Column[ServiceRow], ...] = (
    Column("SERVICE", lambda row: row.service),
    Column("TYPE", lambda row: row.type),
    Column("PORT", lambda row: row.port),
    Column("ADDRESSES", lambda row: row.addresses),
    Column("INTERNAL", lambda row: row.internal or ["none"], is_below=True),
    Column("EXTERNAL", lambda row: row.external or ["none"], is_below=True),
)
_UNUSED: Column[ServiceRow] = Column("UNUSED", lambda row: row.unused or ["none"], is_below=True)
_LABELS: Column[ServiceRow] = Column("LABELS", lambda row: row.labels, is_below=True)
_ANNOTATIONS: Column[ServiceRow] = Column("ANNOTATIONS", lambda row: row.annotations, is_below=True)


def columns(requested: pb.NextFilter) -> tuple[Column[ServiceRow], ...]:
    """Those that have something with this filter."""
    further = (
        (_UNUSED, requested.all_endpoints),
        (_LABELS, bool(requested.label_patterns)),
        (_ANNOTATIONS, bool(requested.annotation_patterns)),
    )
    return (*_COLUMNS, *(column for column, is_shown in further if is_shown))


def document(state: ServicesState, *, has_position: bool = True) -> dict[str, Any]:
    """instanceId, rev, savedAt and services, as in protobuf's JSON form.

    has_position: false leaves out all but the services, which are the same by way of a file.
    """
    header = {"instanceId": str(state.instance_id), "rev": str(state.rev)}
    if state.saved_at:
        header["savedAt"] = state.saved_at.isoformat()
    return {
        **(header if has_position else {}),
        "services": [_service(service) for service in state.services],
    }


def _service(message: pb.ServiceEndpoints) -> dict[str, Any]:
    """The same service is always the same text: protobuf's maps have no order."""
    found: dict[str, Any] = json_format.MessageToDict(message)
    maps = {name: dict(sorted(found[name].items())) for name in _MAPS if name in found}
    return {**found, **maps}


def rows(services: Iterable[pb.ServiceEndpoints]) -> list[ServiceRow]:
    """One for each port of each service."""
    return [
        ServiceRow(
            service=full_name(service.namespace, service.name),
            type=_type(service),
            port=_port(port),
            addresses=_addresses(service),
            internal=_endpoints([each for each in port.endpoints if each.is_internal]),
            external=_endpoints([each for each in port.endpoints if each.is_external]),
            unused=_endpoints([each for each in port.endpoints if not _is_used(each)]),
            labels=_pairs(service.labels),
            annotations=_pairs(service.annotations),
        )
        for service in services
        for port in service.ports or (pb.ServicePort(),)
    ]


def show(
    screen: Screen,
    state: ServicesState,
    shown: tuple[Column[ServiceRow], ...],
    found: list[ServiceRow],
) -> None:
    """Print one line per port of each service."""
    screen.table(shown, found)
    screen.line(
        f"{len(state.services)} services, revision {state.rev}; * on this node, (x) terminating"
    )
    if state.saved_at:
        screen.line(
            f"Saved {screen.age(state.saved_at)}; its source has not confirmed it since.",
            Signal.CAUTION,
        )


def _type(service: pb.ServiceEndpoints) -> str:
    if service.is_headless:
        return "headless"
    name: str = pb.ServiceType.Name(service.type)
    return name.removeprefix("SERVICE_TYPE_").lower().replace("_", " ")


def _addresses(service: pb.ServiceEndpoints) -> list[str]:
    names = [one.hostname for one in service.load_balancer_ingress if one.hostname]
    found = [*service.cluster_ips, *service.external_ips, *service.load_balancer_ips, *names]
    return [service.external_name] if service.external_name else found


def _pairs(found: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in sorted(found.items())]


def _is_used(endpoint: pb.Endpoint) -> bool:
    return endpoint.is_internal or endpoint.is_external or endpoint.is_external_from_node


def _port(port: pb.ServicePort) -> str:
    if not port.port:
        return ""
    protocol = pb.Protocol.Name(port.protocol).removeprefix("PROTOCOL_").lower()
    name = f"{port.name} " if port.name else ""
    node_port = f", node {port.node_port}" if port.node_port else ""
    return f"{name}{port.port}/{protocol}{node_port}"


def _endpoints(found: list[pb.Endpoint]) -> list[str]:
    shown = [_endpoint(each) for each in found[:_MAX_ENDPOINTS]]
    more = len(found) - _MAX_ENDPOINTS
    return [*shown, f"and {more} more"] if more > 0 else shown


def _endpoint(endpoint: pb.Endpoint) -> str:
    address = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
    port = f":{endpoint.port}" if endpoint.port else ""
    flags = f"{'*' if endpoint.is_local else ''}{' (x)' if endpoint.is_terminating else ''}"
    pod = f" {full_name(endpoint.pod.namespace, endpoint.pod.name)}" if endpoint.pod.name else ""
    node = f" on {endpoint.node}" if endpoint.node else ""
    return f"{address}{port}{flags}{pod}{node}"
