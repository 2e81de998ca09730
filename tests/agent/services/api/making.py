"""Services and slices as the API server writes them."""

from typing import Any

import msgspec

from agent.services.api import filters, objects
from agent.services.api.encoder import ServiceEncoder
from agent.services.api.slices import ReadinessSource
from agent.services.api.store import ServiceStore
from agent.services.api.view import ServiceView
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

Json = dict[str, Any]

NODE = "node1"
PORTS: list[Json] = [{"name": "http", "protocol": "TCP", "port": 80}]
SLICE_PORTS: list[Json] = [{"name": "http", "protocol": "TCP", "port": 8080}]


def service_json(name: str = "web", *, labels: dict[str, str] | None = None, **spec: Any) -> Json:
    """ClusterIP with one port, unless `spec` overrides it."""
    status = spec.pop("status", {})
    return {
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": f"uid-{name}",
            "labels": labels or {},
        },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "198.18.0.1",
            "clusterIPs": ["198.18.0.1"],
            "ports": PORTS,
            **spec,
        },
        "status": status,
    }


def endpoint_json(
    address: str,
    *,
    node: str | None = "other",
    ready: bool | None = True,
    serving: bool | None = None,
    terminating: bool | None = None,
    zones: list[str] | None = None,
    nodes: list[str] | None = None,
    uid: str = "",
    **more: Any,
) -> Json:
    made: Json = {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
        "nodeName": node,
        **more,
    }
    if zones is not None or nodes is not None:
        made["hints"] = {
            "forZones": [{"name": zone} for zone in zones or ()],
            "forNodes": [{"name": name} for name in nodes or ()],
        }
    if uid:
        made["targetRef"] = {"kind": "Pod", "namespace": "default", "name": "p", "uid": uid}
    return made


def slice_json(
    *endpoints: Json,
    name: str = "web-1",
    service: str = "web",
    family: str = "IPv4",
    ports: list[Json] | None = SLICE_PORTS,
) -> Json:
    return {
        "metadata": {
            "namespace": "default",
            "name": name,
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "ports": ports,
        "endpoints": list(endpoints),
    }


def service(*args: Any, **spec: Any) -> objects.ApiService:
    made: objects.ApiService = read(service_json(*args, **spec), objects.ApiService)
    return made


def endpoint_slice(*endpoints: Json, **more: Any) -> objects.EndpointSlice:
    made: objects.EndpointSlice = read(slice_json(*endpoints, **more), objects.EndpointSlice)
    return made


def read(content: Json, kind: Any) -> Any:
    """By way of JSON, as the watch does."""
    return msgspec.json.decode(msgspec.json.encode(content), type=kind)


def no_readiness(uid: str, address: str) -> bool | None:
    return None


def encoded(
    one: objects.ApiService,
    *found: objects.EndpointSlice,
    zone: str = "",
    readiness: ReadinessSource = no_readiness,
    **request: Any,
) -> pb.ServiceEndpoints:
    """The service as `NODE` gets it. zone: of that node; request: fields of the filter."""
    made = selected(one, *found, zone=zone, readiness=readiness, **request)
    assert made is not None
    return made


def selected(
    one: objects.ApiService,
    *found: objects.EndpointSlice,
    zone: str = "",
    readiness: ReadinessSource = no_readiness,
    **request: Any,
) -> pb.ServiceEndpoints | None:
    """As `encoded`; None if the filter does not select the service."""
    store = ServiceStore(NODE, readiness=readiness)
    store.set_zone(zone)
    store.set_service(None, one)
    for number, each in enumerate(found):
        own = {**each.metadata.labels, objects.SERVICE_NAME_LABEL: one.metadata.name}
        metadata = msgspec.structs.replace(each.metadata, name=f"{number}", labels=own)
        store.set_slice(None, msgspec.structs.replace(each, metadata=metadata))
    selection = filters.read(pb.NextFilter(**request))
    encoder = ServiceEncoder(store, selection.form, is_for_all_nodes=False)
    view = ServiceView(store, encoder, node=NODE, selection=selection, instance_id=1)
    while view.dirty:
        view.evaluate_next()
    view.commit(1, None)
    items = [pb.NextItem.FromString(item) for item in view.snapshot().messages()]
    services = [service for item in items for service in item.services.items]
    return services[0] if services else None


def targets(port: pb.ServicePort, kind: str = "internal") -> list[str]:
    """ "address:port" of each endpoint for that kind of traffic, in the order of the message."""
    return [f"{one.address}:{one.port}" for one in port.endpoints if getattr(one, f"is_{kind}")]
