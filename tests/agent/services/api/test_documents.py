"""What a file of services holds: objects, and one sentence for each mistake."""

import json
import pathlib
from typing import Any

import pytest
from google.protobuf import json_format

from agent.services.api import documents
from agent.services.api.documents import MESSAGE, SERVICE, SLICE, FileContent
from agent.services.api.objects import ApiService, EndpointSlice
from tests.agent.services.api import making
from tests.agent.services.api.making import Json, endpoint_json, service_json, slice_json
from tests.agent.services.api.test_decode import message

LONGEST = "x" * 253
TOO_LONG = "x" * 254


def service(name: str = "web", **spec: Any) -> Json:
    return {"apiVersion": "v1", "kind": "Service", **service_json(name, **spec)}


def endpoint_slice(*endpoints: Json, **more: Any) -> Json:
    head = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
    return {**head, **slice_json(*endpoints, **more)}


def in_namespace(namespace: object, document: Json) -> Json:
    return {**document, "metadata": {**document["metadata"], "namespace": namespace}}


def as_message(name: str = "web", **changes: Any) -> Json:
    """As `podgate services --all` writes it."""
    sent = message(
        making.service(name), [making.endpoint_slice(endpoint_json("198.19.0.1"), service=name)]
    )
    return {**json_format.MessageToDict(sent), **changes}


def with_two_addresses(first: str, second: str, **more: Any) -> Json:
    return endpoint_slice({"addresses": [first, second]}, **more)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "services.yaml"


def read(path: pathlib.Path, *found: object) -> FileContent:
    """JSON is YAML: a document for each."""
    path.write_text("\n---\n".join(json.dumps(one) for one in found), encoding="utf-8")
    return documents.read(path)


@pytest.mark.parametrize(
    "document",
    [
        service(LONGEST),
        in_namespace(LONGEST, service()),
        service(type="NodePort", ports=[{"port": 1, "nodePort": 65535}]),
        service(ports=[{"port": 65535, "protocol": "SCTP"}]),
        service(ports=None),
        service(healthCheckNodePort=65535),
        service(clusterIP="None", clusterIPs=["None"]),
        service(clusterIP="None", clusterIPs=None),
        service(clusterIP="", clusterIPs=[]),
        service(clusterIP="", clusterIPs=[""]),
        service(externalIPs=["198.18.9.1", "fd00:18::1"]),
        service(loadBalancerSourceRanges=["198.18.0.0/15", "::/0"]),
        service(status={"loadBalancer": {"ingress": [{"hostname": "lb.example"}]}}),
        service(status={"loadBalancer": {"ingress": [{"ip": "198.18.8.1"}]}}),
    ],
    ids=str,
)
def test_service_without_a_mistake_is_read_as_it_is(path: pathlib.Path, document: Json) -> None:
    expected = making.read(document, ApiService)
    key = (expected.metadata.namespace, expected.metadata.name)
    assert read(path, document) == FileContent({key: expected})


@pytest.mark.parametrize(
    "document",
    [
        endpoint_slice(name=LONGEST),
        endpoint_slice(endpoint_json("198.19.0.1"), ports=[{"port": 1}, {"port": 65535}]),
        endpoint_slice(ports=[{"name": "any", "protocol": None, "port": None}]),
        endpoint_slice(ports=None),
        endpoint_slice(endpoint_json("fd00:19::1"), family="IPv6"),
        with_two_addresses("198.19.0.1", "198.19.0.2"),
        endpoint_slice(endpoint_json("db.example"), family="FQDN"),
        {**endpoint_slice(), "endpoints": None},
    ],
    ids=str,
)
def test_slice_without_a_mistake_is_read_as_it_is(path: pathlib.Path, document: Json) -> None:
    expected = making.read(document, EndpointSlice)
    assert read(path, document) == FileContent(
        slices={("default", expected.metadata.name): expected}
    )


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (service(TOO_LONG), f"metadata.name is '{TOO_LONG}'; write a DNS name"),
        (service("wéb"), "metadata.name is 'wéb'; write a DNS name"),
        (service("a b"), "metadata.name is 'a b'; write a DNS name"),
        (service("a/b"), "metadata.name is 'a/b'; write a DNS name"),
        (service("a\tb"), r"metadata.name is 'a\tb'; write a DNS name"),
        (in_namespace("a/b", service()), "metadata.namespace is 'a/b'; write a DNS name"),
        (
            service(clusterIP="198.18", clusterIPs=None),
            "clusterIPs has '198.18'; write an IP address",
        ),
        (
            service(clusterIP="", clusterIPs=["198.18.0.1", "fd00"]),
            "clusterIPs has 'fd00'; write an IP address",
        ),
        (service(externalIPs=["lb.example"]), "externalIPs has 'lb.example'; write an IP address"),
        (
            service(status={"loadBalancer": {"ingress": [{"ip": "lb"}]}}),
            "status.loadBalancer.ingress has 'lb'; write an IP address",
        ),
        (service(ports=[{"port": 0}]), "ports[].port is 0; write 1 to 65535"),
        (service(ports=[{"port": 65536}]), "ports[].port is 65536; write 1 to 65535"),
        (
            service(ports=[{"port": 1, "nodePort": 65536}]),
            "ports[].nodePort is 65536; write 0 to 65535",
        ),
        (service(ports=[{"port": 1, "nodePort": -1}]), "ports[].nodePort is -1; write 0 to 65535"),
        (
            service(healthCheckNodePort=65536),
            "healthCheckNodePort is 65536; write 0 to 65535",
        ),
        (endpoint_slice(name=""), "metadata.name is ''; write a DNS name"),
        (endpoint_slice(family=""), "addressType is ''; write IPv4 or IPv6"),
        (endpoint_slice(ports=[{"port": 0}]), "ports[].port is 0; write 1 to 65535"),
        (endpoint_slice(ports=[{"port": 65536}]), "ports[].port is 65536; write 1 to 65535"),
        (
            endpoint_slice(ports=[{"port": 1, "protocol": "ICMP"}]),
            "ports[].protocol is 'ICMP'; write one of TCP, UDP, SCTP",
        ),
        (
            endpoint_slice(family="FQDN", ports=[{"port": 0}]),
            "ports[].port is 0; write 1 to 65535",
        ),
        (
            endpoint_slice({"addresses": None}, family="IPv6"),
            "an endpoint has no address; add one",
        ),
        (
            endpoint_slice(endpoint_json("198.19.0.1"), family="IPv6"),
            "endpoints[].addresses has '198.19.0.1'; write an address of IPv6",
        ),
        (
            with_two_addresses("198.19.0.1", "198.19"),
            "endpoints[].addresses has '198.19'; write an address of IPv4",
        ),
        (
            {**endpoint_slice(), "apiVersion": "v1"},
            "its apiVersion is 'v1'; write discovery.k8s.io/v1",
        ),
        (
            as_message(type="SERVICE_TYPE_UNSPECIFIED"),
            "type is ''; write one of ClusterIP, NodePort, LoadBalancer, ExternalName",
        ),
        (as_message(clusterIps=["198.18"]), "clusterIPs has '198.18'; write an IP address"),
        (
            as_message(
                ports=[
                    {
                        "port": 80,
                        "protocol": "PROTOCOL_TCP",
                        "endpoints": [{"address": "198.19.0.1", "port": 70000, "conditions": {}}],
                    }
                ]
            ),
            "ports[].port is 70000; write 1 to 65535",
        ),
        (
            as_message(ports=[{"port": 80, "endpoints": [{"address": "198.19.0.1"}]}]),
            "service default/web has an endpoint '198.19.0.1' without details; request all of them "
            "('podgate services --all')",
        ),
    ],
    ids=str,
)
def test_mistake_is_one_sentence_and_the_document_is_left_out(
    path: pathlib.Path, document: Json, problem: str
) -> None:
    metadata = document.get("metadata", document)
    key = (metadata["namespace"], metadata["name"])
    named = f" ({'/'.join(key)})" if key[1] else ""
    assert read(path, document) == FileContent(
        problems=[f"services.yaml{named}: {problem}"],
        rejected={(document.get("kind", MESSAGE), key) if key[1] else None},
    )


def test_service_as_podgate_writes_it_has_its_slices(path: pathlib.Path) -> None:
    found = read(path, as_message("web"), as_message("db"))
    assert (found.problems, found.rejected) == ([], set())
    assert list(found.services) == [("default", "web"), ("default", "db")]
    assert [one.service for one in found.slices.values()] == ["web", "db"]
    both = {"services": [as_message("web"), as_message("db")]}
    assert read(path, both) == found


def test_field_that_messages_lack_is_named(path: pathlib.Path) -> None:
    found = read(path, as_message(clusterIp="198.18.0.1"))
    (problem,) = found.problems
    assert problem.startswith(
        "services.yaml (default/web): it is neither a Kubernetes object nor a service: "
    )
    assert '"clusterIp"' in problem


@pytest.mark.parametrize("namespace", ["", None])
def test_namespace_is_the_one_of_kubectl_if_it_is_left_out(
    path: pathlib.Path, namespace: str | None
) -> None:
    documents = [in_namespace(namespace, service()), in_namespace(namespace, endpoint_slice())]
    assert read(path, *documents) == read(path, service(), endpoint_slice())


@pytest.mark.parametrize(
    ("document", "rejected"),
    [
        ("text", None),
        ({"kind": "Pod", "metadata": {"name": "x", "namespace": "a"}}, None),
        ({"apiVersion": "v1", "kind": "Service"}, None),
        ({"kind": "Service", "metadata": ["x"]}, None),
        ({"kind": "Service", "metadata": {}}, None),
        ({"kind": "Service", "metadata": {"name": ""}}, None),
        ({"kind": "Service", "metadata": {"name": 5}}, None),
        ({"kind": "Service", "metadata": {"name": "x", "namespace": 5}}, None),
        ({"kind": "Service", "metadata": {"name": "x"}}, (SERVICE, ("default", "x"))),
        (
            {"kind": "EndpointSlice", "metadata": {"name": "x", "namespace": "a"}},
            (SLICE, ("a", "x")),
        ),
        ({"name": "x", "namespace": "a"}, (MESSAGE, ("a", "x"))),
        ({"namespace": "a", "metadata": {"name": "x"}}, None),
    ],
    ids=str,
)
def test_rejected_document_has_its_name_where_it_is_readable(
    path: pathlib.Path, document: object, rejected: object
) -> None:
    found = read(path, document)
    assert found.rejected == {rejected}
    assert len(found.problems) == 1
    assert not found.services


def test_place_of_a_mistake_is_the_document_and_the_item(path: pathlib.Path) -> None:
    wrong = {"kind": "Pod"}
    reason = "its kind is 'Pod'; only Service and EndpointSlice are read"
    alone = read(path, wrong)
    assert alone.problems == [f"services.yaml: {reason}"]
    listed = {"kind": "List", "items": [wrong, service("a"), wrong]}
    found = read(path, wrong, listed, {"services": [wrong]})
    assert found.problems == [
        f"services.yaml, document 1: {reason}",
        f"services.yaml, document 2, item 1: {reason}",
        f"services.yaml, document 2, item 3: {reason}",
        f"services.yaml, document 3, item 1: {reason}",
    ]
    assert list(found.services) == [("default", "a")]


def test_items_of_a_typed_list_are_of_its_kind_unless_they_have_one(path: pathlib.Path) -> None:
    items: list[object] = [slice_json(), service(), "text"]
    found = read(path, {"kind": "EndpointSliceList", "items": items})
    assert found.problems == [
        "services.yaml, item 3: it is not an object; write a Service or an EndpointSlice"
    ]
    assert list(found.slices) == [("default", "web-1")]
    assert list(found.services) == [("default", "web")]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (
            {"kind": "List", "items": {"kind": "Service"}},
            "its kind is 'List'; only Service and EndpointSlice are read",
        ),
        (
            {"kind": "PodList", "items": [{"metadata": {"name": "x"}}]},
            "its kind is 'Pod'; only Service and EndpointSlice are read",
        ),
        (
            {"kind": "Lists", "services": [service()]},
            "its kind is 'Lists'; only Service and EndpointSlice are read",
        ),
    ],
    ids=str,
)
def test_list_of_something_else_is_a_mistake(
    path: pathlib.Path, document: Json, problem: str
) -> None:
    (found,) = read(path, document).problems
    assert found.endswith(f": {problem}")


@pytest.mark.parametrize("kind", [service, endpoint_slice, as_message])
def test_object_that_a_file_has_twice_stays_as_the_first(path: pathlib.Path, kind: Any) -> None:
    once = read(path, kind())
    twice = read(path, kind(), kind())
    assert (twice.services, twice.slices) == (once.services, once.slices)
    what = "EndpointSlice" if kind is endpoint_slice else "Service"
    (problem,) = twice.problems
    assert problem.endswith(f": the file has this {what} twice; remove one of the two")


def test_no_more_than_twenty_mistakes_are_listed(path: pathlib.Path) -> None:
    assert len(read(path, *["text"] * 20).problems) == 20
    found = read(path, *["text"] * 23)
    assert len(found.problems) == 21
    assert found.problems[19].startswith("services.yaml, document 20: ")
    assert found.problems[20] == "services.yaml: 3 more problems"


def test_file_of_a_large_cluster_is_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "services.json"
    path.write_text(json.dumps(service()) + " " * (2 << 20), encoding="utf-8")
    assert list(documents.read(path).services) == [("default", "web")]
