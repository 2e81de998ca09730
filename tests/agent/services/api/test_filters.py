"""Filters of requests: which services and fields are sent, and which requests are rejected."""

from typing import Any

import pytest

from agent.services.api import filters, objects
from agent.services.api.filters import FilterError
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.services.api.making import (
    NODE,
    encoded,
    endpoint_json,
    endpoint_slice,
    read,
    selected,
    service,
    service_json,
    targets,
)

EXTERNAL: dict[str, Any] = {
    "type": "ExternalName",
    "clusterIP": "",
    "clusterIPs": None,
    "externalName": "db.example",
}
HEADLESS: dict[str, Any] = {"clusterIP": "None", "clusterIPs": ["None"]}
BOTH: dict[str, Any] = {"clusterIPs": ["198.18.0.1", "fd00:18::1"]}
PROXY = {"service.kubernetes.io/service-proxy-name": "own"}
HERE = endpoint_json("198.19.0.1", node=NODE)
V4, V6 = pb.ADDRESS_FAMILY_IPV4, pb.ADDRESS_FAMILY_IPV6


@pytest.mark.parametrize(
    ("spec", "request_fields", "is_selected"),
    [
        ({}, {}, True),
        ({}, {"namespaces": ["default", "other"]}, True),
        ({}, {"namespaces": ["other"]}, False),
        ({}, {"types": [pb.SERVICE_TYPE_CLUSTER_IP]}, True),
        ({}, {"types": [pb.SERVICE_TYPE_NODE_PORT, pb.SERVICE_TYPE_LOAD_BALANCER]}, False),
        (HEADLESS, {"types": [pb.SERVICE_TYPE_CLUSTER_IP]}, True),
        (EXTERNAL, {}, False),
        (EXTERNAL, {"types": [pb.SERVICE_TYPE_EXTERNAL_NAME]}, True),
        ({"labels": PROXY}, {}, False),
        ({"labels": PROXY}, {"service_proxy_name": "own"}, True),
        ({"labels": PROXY}, {"service_proxy_name": "another"}, False),
        ({"labels": PROXY}, {"service_proxy_name": "*"}, True),
        ({}, {"service_proxy_name": "own"}, False),
        ({}, {"service_proxy_name": "*"}, True),
        ({}, {"families": [V6]}, False),
        ({}, {"families": [V4]}, True),
        (BOTH, {"families": [V6]}, True),
        (HEADLESS, {"families": [V6]}, True),
        (EXTERNAL, {"types": [pb.SERVICE_TYPE_EXTERNAL_NAME], "families": [V6]}, True),
    ],
)
def test_filter_selects(
    spec: dict[str, Any], request_fields: dict[str, Any], is_selected: bool
) -> None:
    assert (selected(service(**spec), **request_fields) is not None) is is_selected


def test_external_name_has_its_name_and_ports_without_endpoints() -> None:
    types = [pb.SERVICE_TYPE_EXTERNAL_NAME]
    found = encoded(service(**EXTERNAL), types=types)
    assert (found.type, found.external_name) == (pb.SERVICE_TYPE_EXTERNAL_NAME, "db.example")
    assert [(port.port, list(port.endpoints)) for port in found.ports] == [(80, [])]


def test_families_restrict_everything_that_has_one() -> None:
    both = service(
        type="LoadBalancer",
        externalIPs=["198.18.9.1", "fd00:18::9"],
        loadBalancerSourceRanges=["198.18.3.0/24", "fd00:18:3::/48"],
        status={
            "loadBalancer": {
                "ingress": [{"ip": "198.18.8.1"}, {"ip": "fd00:18::8"}, {"hostname": "lb.example"}]
            }
        },
        **BOTH,
    )
    slices = [
        endpoint_slice(HERE),
        endpoint_slice(endpoint_json("fd00:18::5", node=NODE), family="IPv6"),
    ]
    everything = encoded(both, *slices)
    assert len(everything.cluster_ips) == len(everything.ports[0].endpoints) == 2
    found = encoded(both, *slices, families=[V6])
    assert list(found.cluster_ips) == ["fd00:18::1"]
    assert list(found.external_ips) == ["fd00:18::9"]
    assert list(found.load_balancer_ips) == ["fd00:18::8"]
    assert list(found.load_balancer_source_ranges) == ["fd00:18:3::/48"]
    assert [one.ip or one.hostname for one in found.load_balancer_ingress] == [
        "fd00:18::8",
        "lb.example",
    ]
    assert targets(found.ports[0]) == ["fd00:18::5:8080"]
    assert encoded(both, *slices, families=[V4, V6]) == everything
    headless = service(**HEADLESS)
    assert targets(encoded(headless, *slices, families=[V4]).ports[0]) == ["198.19.0.1:8080"]


def test_labels_and_annotations_are_sent_by_pattern() -> None:
    content = service_json(labels={"app": "web", "team.example/name": "a", "team.example/id": "7"})
    content["metadata"]["annotations"] = {
        "example.com/weight": "3",
        "kubectl.kubernetes.io/last-applied-configuration": "{}",
    }
    one = read(content, objects.ApiService)
    plain = encoded(one)
    assert (dict(plain.labels), dict(plain.annotations)) == ({}, {})
    found = encoded(one, label_patterns=["team.example/*", "none"], annotation_patterns=["*"])
    assert dict(found.labels) == {"team.example/name": "a", "team.example/id": "7"}
    assert dict(found.annotations) == {"example.com/weight": "3"}
    assert dict(encoded(one, label_patterns=["app"]).labels) == {"app": "web"}


@pytest.mark.parametrize(
    ("key", "pattern", "is_match"),
    [
        ("app", "app", True),
        ("app", "ap", False),
        ("app", "*", True),
        ("", "*", True),
        ("app", "a*", True),
        ("app", "*p", True),
        ("app", "a*p", True),
        ("aba", "ab*ba", False),
        ("abba", "ab*ba", True),
        ("a/b/c", "a*b*c", True),
        ("a/c/b", "a*b*c", False),
        ("a.b", "a*.*b", True),
        ("abc", "*b*b*", False),
        ("b", "*b*", True),
        ("abcb", "*b*b*", True),
        ("app", "a**p", True),
        ("a?p", "a?p", True),
        ("app", "a.p", False),
    ],
)
def test_star_matches_any_part_of_a_key(key: str, pattern: str, is_match: bool) -> None:
    assert filters.matches(key, pattern) is is_match


def test_pattern_of_a_hostile_client_takes_no_time() -> None:
    assert not filters.matches("a" * 300, "*a" * 150 + "b")


def test_all_endpoints_are_sent_with_what_this_node_uses() -> None:
    found = [
        endpoint_slice(
            HERE,
            endpoint_json("198.19.0.2", ready=False),
            endpoint_json("198.19.0.3", ready=False, serving=True, terminating=True),
        )
    ]
    port = encoded(service(), *found, all_endpoints=True).ports[0]
    assert [(one.address, one.is_internal, one.is_terminating) for one in port.endpoints] == [
        ("198.19.0.1", True, False),
        ("198.19.0.2", False, False),
        ("198.19.0.3", False, False),
    ]
    assert [one.is_local for one in port.endpoints] == [True, False, False]
    headless = encoded(service(**HEADLESS), *found, all_endpoints=True).ports[0]
    assert [one.is_internal for one in headless.endpoints] == [True, False, False]
    none_ready = endpoint_slice(endpoint_json("198.19.0.2", ready=False))
    for spec in ({}, HEADLESS):
        port = encoded(service(**spec), none_ready, all_endpoints=True).ports[0]
        assert (len(port.endpoints), port.has_endpoints_anywhere) == (1, False)


def test_details_of_an_endpoint_are_those_of_its_slice() -> None:
    detailed = endpoint_json(
        "198.19.0.1",
        node=NODE,
        ready=None,
        serving=True,
        terminating=None,
        zones=["a", "b"],
        nodes=[NODE],
        uid="u1",
        zone="a",
    )
    bare = endpoint_json("198.19.0.2", node=None, ready=False, serving=False)
    slices = [endpoint_slice(detailed, bare)]
    first, second = (
        encoded(service(), *slices, endpoint_details=True, all_endpoints=True).ports[0].endpoints
    )
    assert (first.node, first.zone) == (NODE, "a")
    assert first.pod == pb.PodReference(namespace="default", name="p", uid="u1")
    assert first.conditions == pb.EndpointConditions(ready=True, serving=True)
    assert (list(first.hint_zones), list(first.hint_nodes)) == (["a", "b"], [NODE])
    assert (second.node, second.zone, second.HasField("pod")) == ("", "", False)
    assert second.HasField("conditions")
    assert second.conditions == pb.EndpointConditions()
    (plain,) = encoded(service(), *slices).ports[0].endpoints
    assert (plain.node, plain.zone, list(plain.hint_zones)) == ("", "", [])
    assert not plain.HasField("pod")
    assert not plain.HasField("conditions")


def test_endpoint_of_something_else_than_a_pod_has_no_pod() -> None:
    target = {"kind": "ServiceImport", "name": "p", "uid": "u"}
    found = endpoint_slice(endpoint_json("198.19.0.1", targetRef=target))
    (endpoint,) = encoded(service(), found, endpoint_details=True).ports[0].endpoints
    assert not endpoint.HasField("pod")


def test_conditions_are_the_newest_of_this_node() -> None:
    own = endpoint_slice(endpoint_json("198.19.0.1", node=NODE, uid="u1"))
    fields: dict[str, Any] = {"endpoint_details": True, "all_endpoints": True}
    for spec, expected in (
        ({}, pb.EndpointConditions()),
        # Not-ready pods are to be used, so their slices count.
        ({"publishNotReadyAddresses": True}, pb.EndpointConditions(ready=True, serving=True)),
    ):
        found = encoded(service(**spec), own, readiness=lambda uid, address: False, **fields)
        assert found.ports[0].endpoints[0].conditions == expected
        assert found.publish_not_ready_addresses is bool(spec)


def test_load_balancer_has_its_addresses_and_names_with_their_mode() -> None:
    ingress = [
        {"ip": "198.18.8.1"},
        {"ip": "198.18.8.2", "ipMode": "Proxy"},
        {"ip": "198.18.8.3", "ipMode": "VIP", "hostname": "lb3.example"},
        {"ip": "198.18.8.4", "ipMode": "New"},
        {"hostname": "lb.example"},
        {"ip": "no address"},
        {"ip": "fd00:18::8"},
    ]
    found = encoded(service(type="LoadBalancer", status={"loadBalancer": {"ingress": ingress}}))
    assert list(found.load_balancer_ingress) == [
        pb.LoadBalancerIngress(ip="198.18.8.1", ip_mode=pb.IP_MODE_VIP),
        pb.LoadBalancerIngress(ip="198.18.8.2", ip_mode=pb.IP_MODE_PROXY),
        pb.LoadBalancerIngress(ip="198.18.8.3", hostname="lb3.example", ip_mode=pb.IP_MODE_VIP),
        pb.LoadBalancerIngress(ip="198.18.8.4"),
        pb.LoadBalancerIngress(hostname="lb.example"),
    ]
    assert list(found.load_balancer_ips) == ["198.18.8.1", "198.18.8.3"]


def test_service_names_its_proxy() -> None:
    assert encoded(service(labels=PROXY), service_proxy_name="own").service_proxy_name == "own"


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"types": [0]}, r"types has 0; its values are \[1, 2, 3, 4\]"),
        ({"types": [1, 77]}, "types has 77"),
        ({"families": [3]}, r"families has 3; its values are \[1, 2\]"),
        ({"namespaces": [""]}, "namespaces has an empty text"),
        ({"label_patterns": [""]}, "label_patterns has an empty text"),
        ({"annotation_patterns": [f"a{n}*" for n in range(33)]}, "32 is the maximum"),
    ],
)
def test_invalid_filter_is_one_clear_sentence(request_fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FilterError, match=message):
        filters.read(pb.NextFilter(**request_fields))


def test_order_and_repetition_make_no_other_filter() -> None:
    first = pb.NextFilter(
        namespaces=["a", "b"],
        types=["SERVICE_TYPE_CLUSTER_IP", "SERVICE_TYPE_NODE_PORT"],
        label_patterns=["x", "y"],
    )
    second = pb.NextFilter(
        namespaces=["b", "a", "b"],
        types=["SERVICE_TYPE_NODE_PORT", "SERVICE_TYPE_CLUSTER_IP"],
        label_patterns=["y", "x"],
        rev=7,
        accepts_delta=True,
    )
    assert filters.read(first) == filters.read(second)
    assert filters.read(pb.NextFilter()) == filters.ServiceFilter()
