"""Output of `podgate services`."""

from typing import Any

from google.protobuf import json_format

from agent.cli.views import tables
from agent.client import endpoints_pb2 as pb
from agent.client.services import ServicesState

_MAX_ENDPOINTS = 6


def as_json(state: ServicesState) -> dict[str, Any]:
    """instanceId, rev, savedAt and services, as in protobuf's JSON form."""
    saved_at = {"savedAt": state.saved_at.isoformat()} if state.saved_at else {}
    return {
        "instanceId": str(state.instance_id),
        "rev": str(state.rev),
        **saved_at,
        "services": [json_format.MessageToDict(service) for service in state.services],
    }


def show(state: ServicesState) -> None:
    """Print one line per port of each service."""
    console = tables.console()
    table = tables.table("SERVICE", "TYPE", "ADDRESSES", "PORT", "INTERNAL", "EXTERNAL")
    for service in state.services:
        for port in service.ports or (pb.ServicePort(),):
            table.add_row(
                tables.full_name(service.namespace, service.name),
                _type(service),
                "\n".join(_addresses(service)),
                _port(port),
                _endpoints([each for each in port.endpoints if each.is_internal]),
                _endpoints([each for each in port.endpoints if each.is_external]),
            )
    console.print(table)
    console.print(
        f"{len(state.services)} services, revision {state.rev}; * on this node, (x) terminating",
        highlight=False,
    )
    if state.saved_at:
        console.print(
            f"Saved at {state.saved_at:%Y-%m-%d %H:%M:%S} UTC; the API server has not confirmed it "
            "since.",
            highlight=False,
        )


def _type(service: pb.ServiceEndpoints) -> str:
    if service.is_headless:
        return "headless"
    name: str = pb.ServiceType.Name(service.type)
    return name.removeprefix("SERVICE_TYPE_").lower().replace("_", " ")


def _addresses(service: pb.ServiceEndpoints) -> tuple[str, ...]:
    return (*service.cluster_ips, *service.external_ips, *service.load_balancer_ips)


def _port(port: pb.ServicePort) -> str:
    if not port.port:
        return ""
    protocol = pb.Protocol.Name(port.protocol).removeprefix("PROTOCOL_").lower()
    name = f"{port.name} " if port.name else ""
    node_port = f", node {port.node_port}" if port.node_port else ""
    return f"{name}{port.port}/{protocol}{node_port}"


def _endpoints(found: list[pb.Endpoint]) -> str:
    shown = [_endpoint(each) for each in found[:_MAX_ENDPOINTS]]
    if len(found) > _MAX_ENDPOINTS:
        shown.append(f"and {len(found) - _MAX_ENDPOINTS} more")
    return "\n".join(shown) or "none"


def _endpoint(endpoint: pb.Endpoint) -> str:
    address = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
    port = f":{endpoint.port}" if endpoint.port else ""
    flags = f"{'*' if endpoint.is_local else ''}{' (x)' if endpoint.is_terminating else ''}"
    return f"{address}{port}{flags}"
