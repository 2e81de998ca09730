"""Output of `podgate services`."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from google.protobuf import json_format

from agent.cli.output import Column, Screen, Signal, full_name
from agent.client.services import ServicesState
from agent.client.v1alpha1 import endpoints_pb2 as pb

_MAX_ENDPOINTS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceRow:
    """One port of one service; internal, external: its endpoints for such connections."""

    service: str
    type: str
    port: str
    addresses: list[str]
    internal: list[str]
    external: list[str]


SERVICES: tuple[Column[ServiceRow], ...] = (
    Column("SERVICE", lambda row: row.service),
    Column("TYPE", lambda row: row.type),
    Column("PORT", lambda row: row.port),
    Column("ADDRESSES", lambda row: row.addresses),
    Column("INTERNAL", lambda row: row.internal or ["none"], is_below=True),
    Column("EXTERNAL", lambda row: row.external or ["none"], is_below=True),
)


def document(state: ServicesState) -> dict[str, Any]:
    """instanceId, rev, savedAt and services, as in protobuf's JSON form."""
    saved_at = {"savedAt": state.saved_at.isoformat()} if state.saved_at else {}
    return {
        "instanceId": str(state.instance_id),
        "rev": str(state.rev),
        **saved_at,
        "services": [json_format.MessageToDict(service) for service in state.services],
    }


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
        )
        for service in services
        for port in service.ports or (pb.ServicePort(),)
    ]


def show(screen: Screen, state: ServicesState, found: list[ServiceRow]) -> None:
    """Print one line per port of each service."""
    screen.table(SERVICES, found)
    screen.line(
        f"{len(state.services)} services, revision {state.rev}; * on this node, (x) terminating"
    )
    if state.saved_at:
        screen.line(
            f"Saved {screen.age(state.saved_at)}; the API server has not confirmed it since.",
            Signal.CAUTION,
        )


def _type(service: pb.ServiceEndpoints) -> str:
    if service.is_headless:
        return "headless"
    name: str = pb.ServiceType.Name(service.type)
    return name.removeprefix("SERVICE_TYPE_").lower().replace("_", " ")


def _addresses(service: pb.ServiceEndpoints) -> list[str]:
    return [*service.cluster_ips, *service.external_ips, *service.load_balancer_ips]


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
    return f"{address}{port}{flags}"
