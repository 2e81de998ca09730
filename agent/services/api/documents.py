"""Services and EndpointSlices in files: what `podgate services --all` writes, and what `kubectl get
services,endpointslices --output yaml` writes.

Operators write and edit these files, so each document is checked as a whole, other than objects of
the API server: one that has a mistake is rejected with one sentence, and affects no other.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from google.protobuf import json_format

from agent.pods import documents
from agent.services.api import addresses, decode, slices
from agent.services.api.object_source import Key
from agent.services.api.objects import HEADLESS, ApiService, EndpointSlice
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

SERVICE, SLICE = "Service", "EndpointSlice"
MESSAGE = ""
"""Kind of a service with its endpoints, as podgate writes it."""
_API_VERSIONS = {SERVICE: "v1", SLICE: "discovery.k8s.io/v1"}
_LIST = "List"
# The default of kubectl.
_NAMESPACE = "default"
_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_FAMILIES = {"IPv4": False, "IPv6": True}
# Names as addresses: no endpoint is made of it, by kube-proxy neither.
_NAMES_ONLY = "FQDN"
_MAX_PROBLEMS = 20

ObjectName = tuple[str, Key]
"""Kind, namespace and name."""


class _InvalidError(Exception):
    """A document is rejected; the message completes the sentence that names it."""


@dataclasses.dataclass(slots=True)
class FileContent:
    """The objects of one file. rejected: names of objects whose documents have a mistake; None for
    a document whose name is not readable."""

    services: dict[Key, ApiService] = dataclasses.field(default_factory=dict)
    slices: dict[Key, EndpointSlice] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    rejected: set[ObjectName | None] = dataclasses.field(default_factory=set)

    def add(self, service: ApiService, found: Iterable[EndpointSlice] = ()) -> None:
        """Raises `_InvalidError` for a second one of the same name."""
        _add(self.services, service, SERVICE)
        for one in found:
            self.add_slice(one)

    def add_slice(self, found: EndpointSlice) -> None:
        _add(self.slices, found, SLICE)


def read(path: pathlib.Path) -> FileContent:
    """The content of a file. Blocks. Raises `DocumentError` for one that is no YAML or JSON."""
    content = FileContent()
    problems = 0
    for where, document in _parts(documents.read_all(path, is_large=True), path.name):
        try:
            _read_part(document, content)
        except _InvalidError as error:
            name = _name_of(document)
            content.rejected.add(name)
            problems += 1
            if problems <= _MAX_PROBLEMS:
                named = f" ({'/'.join(name[1])})" if name else ""
                content.problems.append(f"{where}{named}: {error}")
    if problems > _MAX_PROBLEMS:
        content.problems.append(f"{path.name}: {problems - _MAX_PROBLEMS} more problems")
    return content


def _parts(found: list[object], name: str) -> Iterator[tuple[str, Any]]:
    """Each object with where it is: lists, as kubectl and podgate write them, are expanded."""
    for number, document in enumerate(found, start=1):
        where = f"{name}, document {number}" if len(found) > 1 else name
        items: object = None
        kind = ""
        if isinstance(document, dict):
            if str(document.get("kind", "")).endswith(_LIST):
                items = document.get("items")
                kind = str(document["kind"]).removesuffix(_LIST)
            elif "kind" not in document:
                items = document.get("services")
        if not isinstance(items, list):
            yield where, document
            continue
        for item_number, item in enumerate(items, start=1):
            # Items of a ServiceList have no kind.
            if kind and isinstance(item, dict):
                item = {"kind": kind, "apiVersion": _API_VERSIONS.get(kind, ""), **item}
            yield f"{where}, item {item_number}", item


def _read_part(document: Any, content: FileContent) -> None:
    if not isinstance(document, dict):
        raise _InvalidError("it is not an object; write a Service or an EndpointSlice")
    kind = document.get("kind")
    if kind is None:
        _read_message(document, content)
        return
    if not isinstance(kind, str) or kind not in _API_VERSIONS:
        raise _InvalidError(f"its kind is {kind!r}; only Service and EndpointSlice are read")
    if (version := document.get("apiVersion")) != _API_VERSIONS[kind]:
        raise _InvalidError(f"its apiVersion is {version!r}; write {_API_VERSIONS[kind]}")
    if kind == SERVICE:
        service = _converted(document, ApiService)
        _check_service(service)
        content.add(service)
    else:
        found = _converted(document, EndpointSlice)
        _check_slice(found)
        content.add_slice(found)


def _read_message(document: dict[str, Any], content: FileContent) -> None:
    """A service as `podgate services --all` writes it."""
    try:
        message = json_format.ParseDict(document, pb.ServiceEndpoints())
        service, found = decode.decode_service(message)
    except json_format.ParseError as error:
        raise _InvalidError(f"it is neither a Kubernetes object nor a service: {error}") from error
    except decode.MessageError as error:
        raise _InvalidError(str(error)) from error
    _check_service(service)
    for one in found:
        _check_slice(one)
    content.add(service, found)


def _converted(document: dict[str, Any], kind: type[Any]) -> Any:
    metadata = document.get("metadata")
    if isinstance(metadata, dict) and not metadata.get("namespace"):
        document = {**document, "metadata": {**metadata, "namespace": _NAMESPACE}}
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise _InvalidError(f"{error}; correct it") from error


def _add(objects: dict[Key, Any], new: Any, kind: str) -> None:
    key = (new.metadata.namespace, new.metadata.name)
    if key in objects:
        raise _InvalidError(f"the file has this {kind} twice; remove one of the two")
    objects[key] = new


def _name_of(document: Any) -> ObjectName | None:
    """Of a rejected document, if it has one."""
    if not isinstance(document, dict):
        return None
    kind, metadata = document.get("kind"), document.get("metadata")
    if kind is None:
        kind, metadata = MESSAGE, document
    if not isinstance(metadata, dict) or kind not in (MESSAGE, *_API_VERSIONS):
        return None
    namespace, name = metadata.get("namespace", _NAMESPACE), metadata.get("name")
    if not isinstance(namespace, str) or not isinstance(name, str) or not name:
        return None
    return kind, (namespace, name)


def _check_service(service: ApiService) -> None:
    """Raises `_InvalidError` for the first mistake, where kube-proxy would ignore a part."""
    spec = service.spec
    _check_name(service.metadata.name, "name")
    _check_name(service.metadata.namespace, "namespace")
    _check(spec.type in _TYPES, f"type is {spec.type!r}", f"write one of {', '.join(_TYPES)}")
    for address in spec.cluster_ips or (spec.cluster_ip,):
        if address not in ("", HEADLESS):
            _check_address(address, "clusterIPs")
    for address in spec.external_ips or ():
        _check_address(address, "externalIPs")
    for ingress in service.status.load_balancer.ingress or ():
        if ingress.ip:
            _check_address(ingress.ip, "status.loadBalancer.ingress")
    for network in spec.load_balancer_source_ranges or ():
        _check(
            addresses.parse_network(network) is not None,
            f"loadBalancerSourceRanges has {network!r}",
            "write a network such as 198.18.0.0/15",
        )
    for port in spec.ports or ():
        _check_port(port.port, "ports[].port", minimum=1)
        _check_port(port.node_port, "ports[].nodePort")
        _check_protocol(port.protocol)
    _check_port(spec.health_check_node_port, "healthCheckNodePort")


def _check_slice(found: EndpointSlice) -> None:
    """The same of a slice."""
    kind = found.address_type
    _check_name(found.metadata.name, "name")
    _check(
        kind in (*_FAMILIES, _NAMES_ONLY),
        f"addressType is {kind!r}",
        f"write {' or '.join(_FAMILIES)}",
    )
    for port in found.ports or ():
        if port.port is not None:
            _check_port(port.port, "ports[].port", minimum=1)
        if port.protocol is not None:
            _check_protocol(port.protocol)
    if kind == _NAMES_ONLY:
        return
    for endpoint in found.endpoints or ():
        _check(bool(endpoint.addresses), "an endpoint has no address", "add one")
        for text in endpoint.addresses or ():
            address = addresses.parse(text)
            _check(
                address is not None and address.is_ipv6 is _FAMILIES[kind],
                f"endpoints[].addresses has {text!r}",
                f"write an address of {kind}",
            )


def _check_name(text: str, what: str) -> None:
    # Other characters never reach it through the API server.
    is_valid = 0 < len(text) <= 253 and text.isascii() and text.isprintable() and " " not in text
    _check(is_valid and "/" not in text, f"metadata.{what} is {text!r}", "write a DNS name")


def _check_address(text: str, what: str) -> None:
    _check(addresses.parse(text) is not None, f"{what} has {text!r}", "write an IP address")


def _check_port(number: int, what: str, *, minimum: int = 0) -> None:
    _check(minimum <= number < 1 << 16, f"{what} is {number}", f"write {minimum} to 65535")


def _check_protocol(text: str) -> None:
    _check(
        text in slices.PROTOCOLS,
        f"ports[].protocol is {text!r}",
        f"write one of {', '.join(slices.PROTOCOLS)}",
    )


def _check(is_valid: bool, problem: str, advice: str) -> None:
    if not is_valid:
        raise _InvalidError(f"{problem}; {advice}")
