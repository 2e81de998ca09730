"""One service, from the API's objects to the message."""

from typing import Any

import pytest

from agent.services.api import objects, slices
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.services.api.making import (
    NODE,
    SLICE_PORTS,
    encoded,
    endpoint_json,
    endpoint_slice,
    read,
    selected,
    service,
    slice_json,
    targets,
)

HEADLESS = {"clusterIP": "None", "clusterIPs": ["None"]}
BOTH = {"clusterIP": "198.18.0.1", "clusterIPs": ["198.18.0.1", "fd00:18::1"]}


def test_service_has_all_fields_that_proxies_need() -> None:
    found = encoded(
        service(
            type="LoadBalancer",
            externalIPs=["198.18.9.1"],
            ports=[
                {
                    "name": "http",
                    "protocol": "TCP",
                    "port": 80,
                    "nodePort": 30080,
                    "appProtocol": "kubernetes.io/h2c",
                }
            ],
            sessionAffinity="ClientIP",
            sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}},
            internalTrafficPolicy="Cluster",
            externalTrafficPolicy="Local",
            healthCheckNodePort=31000,
            loadBalancerSourceRanges=[" 198.18.3.7/24 "],
            status={
                "loadBalancer": {
                    "ingress": [
                        {"ip": "198.18.8.1"},
                        {"ip": "198.18.8.2", "ipMode": "Proxy"},
                        {"ip": "198.18.8.3", "ipMode": "VIP"},
                        {"hostname": "lb.example"},
                    ]
                }
            },
        ),
        endpoint_slice(endpoint_json("198.19.0.1", node=NODE), endpoint_json("198.19.1.1")),
    )
    assert (found.namespace, found.name, found.uid) == ("default", "web", "uid-web")
    assert found.type == pb.SERVICE_TYPE_LOAD_BALANCER
    assert list(found.cluster_ips) == ["198.18.0.1"]
    assert list(found.external_ips) == ["198.18.9.1"]
    assert list(found.load_balancer_ips) == ["198.18.8.1", "198.18.8.3"]
    assert list(found.load_balancer_source_ranges) == ["198.18.3.0/24"]
    assert found.session_affinity == pb.SESSION_AFFINITY_CLIENT_IP
    assert found.session_affinity_timeout_seconds == 60
    assert found.internal_traffic_policy == pb.TRAFFIC_POLICY_CLUSTER
    assert found.external_traffic_policy == pb.TRAFFIC_POLICY_LOCAL
    assert found.health_check_node_port == 31000
    (port,) = found.ports
    assert (port.name, port.protocol, port.port, port.node_port, port.app_protocol) == (
        "http",
        pb.PROTOCOL_TCP,
        80,
        30080,
        "kubernetes.io/h2c",
    )
    assert port.has_endpoints_anywhere
    assert targets(port) == ["198.19.0.1:8080", "198.19.1.1:8080"]
    assert targets(port, "external") == ["198.19.0.1:8080"]
    assert targets(port, "external_from_node") == ["198.19.0.1:8080", "198.19.1.1:8080"]
    assert [one.is_local for one in port.endpoints] == [True, False]


def test_source_range_of_all_addresses_restricts_nothing_in_its_family() -> None:
    found = encoded(
        service(loadBalancerSourceRanges=["198.18.3.0/24", "0.0.0.0/0", "fd00:18::/64", "2001::/0"])
    )
    assert list(found.load_balancer_source_ranges) == []
    found = encoded(service(loadBalancerSourceRanges=["198.18.3.0/24", "::/0"]))
    assert list(found.load_balancer_source_ranges) == ["198.18.3.0/24"]


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "ExternalName", "clusterIP": "", "clusterIPs": None, "externalName": "x.example"},
        {"clusterIP": "", "clusterIPs": None},
        {"clusterIP": "not an address", "clusterIPs": ["not an address"]},
        {"type": "Unheard"},
        {"labels": {"service.kubernetes.io/service-proxy-name": "another"}},
    ],
)
def test_services_not_for_proxies_are_left_out(spec: dict[str, Any]) -> None:
    assert selected(service(**spec)) is None


def test_service_without_ports_has_none() -> None:
    assert not encoded(service(ports=None), endpoint_slice(endpoint_json("198.19.0.1"))).ports


def test_port_without_endpoints_is_marked() -> None:
    (port,) = encoded(service(), endpoint_slice()).ports
    assert not port.endpoints
    assert not port.has_endpoints_anywhere


def test_ports_find_their_endpoints_by_name_and_protocol() -> None:
    found = encoded(
        service(
            ports=[
                {"name": "dns", "protocol": "UDP", "port": 53},
                {"name": "dns-tcp", "protocol": "TCP", "port": 53},
                {"name": "old", "protocol": "TCP", "port": 1},
            ]
        ),
        endpoint_slice(
            endpoint_json("198.19.0.1"),
            ports=[
                {"name": "dns", "protocol": "UDP", "port": 5353},
                {"name": "dns-tcp", "protocol": "TCP", "port": 5300},
                {"name": "old", "protocol": "UDP", "port": 2},
            ],
        ),
        # Pods that name another number for the port are in a slice of their own.
        endpoint_slice(
            endpoint_json("198.19.0.2"),
            name="web-2",
            ports=[{"name": "dns", "protocol": "UDP", "port": 5354}],
        ),
    )
    dns, dns_tcp, old = found.ports
    assert targets(dns) == ["198.19.0.1:5353", "198.19.0.2:5354"]
    assert targets(dns_tcp) == ["198.19.0.1:5300"]
    assert targets(old) == []


def test_port_without_a_name_finds_endpoints_without_one() -> None:
    found = encoded(
        service(ports=[{"port": 80}]),
        endpoint_slice(endpoint_json("198.19.0.1"), ports=[{"name": "", "port": 8080}]),
    )
    assert targets(found.ports[0]) == ["198.19.0.1:8080"]


def test_each_family_is_evaluated_separately() -> None:
    found = encoded(
        service(**BOTH),
        endpoint_slice(
            endpoint_json("198.19.0.1", ready=False, serving=True, terminating=True),
        ),
        endpoint_slice(
            endpoint_json("fd00:18:0::2", zones=["a"]),
            endpoint_json("fd00:18::3", zones=["b"]),
            name="web-6",
            family="IPv6",
        ),
        zone="a",
    )
    assert list(found.cluster_ips) == ["198.18.0.1", "fd00:18::1"]
    (port,) = found.ports
    assert targets(port) == ["198.19.0.1:8080", "fd00:18::2:8080"]
    assert [one.is_terminating for one in port.endpoints] == [True, False]


def test_family_without_a_cluster_ip_is_ignored() -> None:
    found = encoded(
        service(externalIPs=["fd00:18::9", "198.18.9.1"]),
        endpoint_slice(endpoint_json("fd00:18::2"), family="IPv6"),
    )
    assert list(found.external_ips) == ["198.18.9.1"]
    assert not found.ports[0].endpoints


def test_terminating_endpoints_are_a_last_resort() -> None:
    leaving = endpoint_json("198.19.0.1", ready=False, serving=True, terminating=True)
    gone = endpoint_json("198.19.0.2", ready=False, serving=False, terminating=True)
    (port,) = encoded(service(), endpoint_slice(leaving, gone)).ports
    assert targets(port) == ["198.19.0.1:8080"]
    assert port.endpoints[0].is_terminating
    (port,) = encoded(service(), endpoint_slice(leaving, gone, endpoint_json("198.19.0.3"))).ports
    assert targets(port) == ["198.19.0.3:8080"]


def test_unset_conditions_are_true_except_terminating() -> None:
    (port,) = encoded(service(), endpoint_slice(endpoint_json("198.19.0.1", ready=None))).ports
    assert targets(port) == ["198.19.0.1:8080"]
    assert not port.endpoints[0].is_terminating


def test_endpoint_in_two_slices_is_listed_once() -> None:
    moving = endpoint_json("198.19.0.1")
    found = encoded(service(), endpoint_slice(moving), endpoint_slice(moving, name="web-2"))
    assert targets(found.ports[0]) == ["198.19.0.1:8080"]


def test_first_of_two_equal_mentions_counts() -> None:
    """By the names of their slices."""
    first, second = (endpoint_json("198.19.0.1", zone=zone) for zone in "ab")
    found = encoded(
        service(),
        endpoint_slice(first),
        endpoint_slice(second),
        endpoint_details=True,
    )
    assert [one.zone for one in found.ports[0].endpoints] == ["a"]


def test_first_address_of_an_endpoint_counts() -> None:
    """As for kube-proxy: the others are of the same pod."""
    both = {**endpoint_json(""), "addresses": ["198.19.0.1", "198.19.0.2"]}
    assert targets(encoded(service(), endpoint_slice(both)).ports[0]) == ["198.19.0.1:8080"]


@pytest.mark.parametrize("is_first", [False, True])
def test_local_and_ready_mention_of_two_counts(is_first: bool) -> None:
    both = [
        endpoint_slice(endpoint_json("198.19.0.1", node=NODE), name="web-2"),
        endpoint_slice(endpoint_json("198.19.0.1", ready=False)),
    ]
    (port,) = encoded(service(), *(both if is_first else reversed(both))).ports
    assert [one.is_local for one in port.endpoints] == [True]


@pytest.mark.parametrize("is_first", [False, True])
def test_running_pod_counts_before_a_terminating_one_with_the_same_address(is_first: bool) -> None:
    ending = endpoint_json("198.19.0.1", node=NODE, ready=False, serving=True, terminating=True)
    both = [
        endpoint_slice(ending, name="web-2"),
        endpoint_slice(endpoint_json("198.19.0.1"), endpoint_json("198.19.0.2", ready=False)),
    ]
    (port,) = encoded(service(), *(both if is_first else reversed(both))).ports
    (found,) = port.endpoints
    assert (found.is_local, found.is_terminating) == (False, False)


def test_headless_services_have_ready_endpoints_for_dns() -> None:
    (port,) = (
        found := encoded(
            service(**HEADLESS),
            endpoint_slice(
                endpoint_json("198.19.0.1", zones=["b"], hostname="db-0"),
                endpoint_json("198.19.0.2", zones=["a"]),
                endpoint_json("198.19.0.3", ready=False),
            ),
            endpoint_slice(endpoint_json("fd00:18::2"), name="web-6", family="IPv6"),
            zone="a",
        )
    ).ports
    assert found.is_headless
    assert not found.cluster_ips
    assert targets(port) == ["198.19.0.1:8080", "198.19.0.2:8080", "fd00:18::2:8080"]
    assert port.endpoints[0].hostname == "db-0"


@pytest.mark.parametrize(
    ("manager", "expected"),
    [
        ("endpointslice-controller.k8s.io", []),
        ("endpointslicemirroring-controller.k8s.io", ["198.19.0.1:8080"]),
        ("staff", ["198.19.0.1:8080"]),
    ],
)
def test_readiness_of_the_node_counts_in_slices_of_the_pods_controller_only(
    manager: str, expected: list[str]
) -> None:
    label = {"endpointslice.kubernetes.io/managed-by": manager}
    managed = slice_json(
        endpoint_json("198.19.0.1", node=NODE), endpoint_json("198.19.0.2", node=NODE, ready=False)
    )
    managed["metadata"]["labels"] |= label
    found: objects.EndpointSlice = read(managed, objects.EndpointSlice)
    (port,) = encoded(service(), found, readiness=lambda uid, address: False).ports
    assert targets(port) == expected
    (port,) = encoded(service(), found, readiness=lambda uid, address: True).ports
    assert ("198.19.0.2:8080" in targets(port)) == (expected == [])


def test_slice_labelled_headless_is_for_dns_only() -> None:
    labelled = slice_json(endpoint_json("198.19.0.1"), name="web-2")
    labelled["metadata"]["labels"]["service.kubernetes.io/headless"] = ""
    of_headless: objects.EndpointSlice = read(labelled, objects.EndpointSlice)
    (port,) = encoded(service(), endpoint_slice(endpoint_json("198.19.0.2")), of_headless).ports
    assert targets(port) == ["198.19.0.2:8080"]
    (port,) = encoded(service(**HEADLESS), of_headless).ports
    assert targets(port) == ["198.19.0.1:8080"]


def test_headless_service_without_ports_still_has_addresses() -> None:
    found = encoded(
        service(**HEADLESS, ports=None), endpoint_slice(endpoint_json("198.19.0.1"), ports=None)
    )
    assert [(port.port, targets(port)) for port in found.ports] == [(0, ["198.19.0.1:0"])]


def test_headless_service_has_endpoints_of_the_requested_families() -> None:
    found = (
        endpoint_slice(endpoint_json("198.19.0.1"), endpoint_json("198.19.0.2", ready=False)),
        endpoint_slice(endpoint_json("fd00:18::2"), name="web-6", family="IPv6"),
    )
    for family, expected in (
        (pb.ADDRESS_FAMILY_IPV4, ["198.19.0.1:8080"]),
        (pb.ADDRESS_FAMILY_IPV6, ["fd00:18::2:8080"]),
    ):
        (port,) = encoded(service(**HEADLESS), *found, families=[family]).ports
        assert targets(port) == expected
        assert port.has_endpoints_anywhere


def test_headless_service_without_ready_endpoints_is_marked() -> None:
    found = endpoint_slice(endpoint_json("198.19.0.1", ready=False))
    (port,) = encoded(service(**HEADLESS), found).ports
    assert (list(port.endpoints), port.has_endpoints_anywhere) == ([], False)
    (port,) = encoded(service(**HEADLESS), found, all_endpoints=True).ports
    assert port.endpoints == [pb.Endpoint(address="198.19.0.1", port=8080)]
    assert not port.has_endpoints_anywhere


def test_last_endpoint_of_a_headless_service_does_not_decide_for_all() -> None:
    found = endpoint_slice(endpoint_json("198.19.0.1"), endpoint_json("198.19.0.2", ready=False))
    (port,) = encoded(service(**HEADLESS), found).ports
    assert (targets(port), port.has_endpoints_anywhere) == (["198.19.0.1:8080"], True)


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        (None, 10800),
        ({"clientIP": None}, 10800),
        ({"clientIP": {"timeoutSeconds": None}}, 10800),
        ({"clientIP": {"timeoutSeconds": 0}}, 10800),
        ({"clientIP": {"timeoutSeconds": 1}}, 1),
        ({"clientIP": {"timeoutSeconds": 86400}}, 86400),
        ({"clientIP": {"timeoutSeconds": 86401}}, 10800),
    ],
)
def test_affinity_lasts_as_long_as_the_service_has_it(config: Any, seconds: int) -> None:
    found = encoded(service(sessionAffinity="ClientIP", sessionAffinityConfig=config))
    assert found.session_affinity == pb.SESSION_AFFINITY_CLIENT_IP
    assert found.session_affinity_timeout_seconds == seconds
    without = encoded(service(sessionAffinity="None", sessionAffinityConfig=config))
    assert without.session_affinity == pb.SESSION_AFFINITY_NONE
    assert without.session_affinity_timeout_seconds == 0


@pytest.mark.parametrize(
    ("kind", "policy", "port"),
    [
        ("LoadBalancer", "Local", 31000),
        ("LoadBalancer", "Cluster", 0),
        ("NodePort", "Local", 0),
    ],
)
def test_health_check_is_of_load_balancers_with_local_traffic(
    kind: str, policy: str, port: int
) -> None:
    found = encoded(service(type=kind, externalTrafficPolicy=policy, healthCheckNodePort=31000))
    assert found.health_check_node_port == port


@pytest.mark.parametrize("number", [1, 65535])
def test_any_port_number_can_be_used(number: int) -> None:
    ports = [{"name": "http", "protocol": "TCP", "port": number, "nodePort": number}]
    found = endpoint_slice(endpoint_json("198.19.0.1"), ports=[{**ports[0], "port": number}])
    (port,) = encoded(service(type="NodePort", ports=ports), found).ports
    assert (port.port, port.node_port) == (number, number)
    assert targets(port) == targets(port, "external") == [f"198.19.0.1:{number}"]


@pytest.mark.parametrize(
    ("spec", "external"),
    [
        ({}, []),
        ({"ports": [{"name": "http", "port": 80, "nodePort": 30080}]}, ["198.19.0.1:8080"]),
        ({"externalIPs": ["198.18.9.1"]}, ["198.19.0.1:8080"]),
        ({"externalIPs": ["fd00:18::9"]}, []),
        ({"status": {"loadBalancer": {"ingress": [{"ip": "198.18.8.1"}]}}}, ["198.19.0.1:8080"]),
        (
            {"status": {"loadBalancer": {"ingress": [{"ip": "198.18.8.1", "ipMode": "Proxy"}]}}},
            [],
        ),
    ],
    ids=str,
)
def test_endpoints_are_for_outside_where_the_service_is_reachable_from_there(
    spec: dict[str, Any], external: list[str]
) -> None:
    (port,) = encoded(service(**spec), endpoint_slice(endpoint_json("198.19.0.1"))).ports
    assert targets(port) == ["198.19.0.1:8080"]
    assert targets(port, "external") == targets(port, "external_from_node") == external


def test_newer_readiness_of_local_pods_counts() -> None:
    ill = endpoint_json("198.19.0.1", node=NODE, uid="ill")
    well = endpoint_json("198.19.0.2", node=NODE, ready=False, uid="well")
    remote = endpoint_json("198.19.0.3", uid="ill")
    leaving = endpoint_json("198.19.0.4", node=NODE, ready=False, terminating=True, uid="well")

    def readiness(uid: str, address: str) -> bool | None:
        return {"ill": False, "well": True}.get(uid)

    found = endpoint_slice(ill, well, remote, leaving)
    assert targets(encoded(service(), found, readiness=readiness).ports[0]) == [
        "198.19.0.2:8080",
        "198.19.0.3:8080",
    ]
    assert targets(encoded(service(), found).ports[0]) == ["198.19.0.1:8080", "198.19.0.3:8080"]


def test_service_that_publishes_not_ready_addresses_ignores_readiness() -> None:
    found = encoded(
        service(publishNotReadyAddresses=True),
        endpoint_slice(endpoint_json("198.19.0.1", node=NODE, serving=False, uid="ill")),
        readiness=lambda uid, address: False,
    )
    assert targets(found.ports[0]) == ["198.19.0.1:8080"]


@pytest.mark.parametrize(
    "endpoint",
    [
        {},
        {"addresses": None},
        {"addresses": []},
        {"addresses": ["no address"]},
        {"addresses": ["fd00:18::2"]},
        {"addresses": ["198.19.0.999"]},
        {"addresses": ["198.19.0.1%eth0"]},
        {"addresses": [""]},
    ],
)
def test_malformed_endpoint_is_left_out(endpoint: dict[str, Any]) -> None:
    found = encoded(service(), endpoint_slice(endpoint, endpoint_json("198.19.0.7")))
    assert targets(found.ports[0]) == ["198.19.0.7:8080"]


@pytest.mark.parametrize(
    "port",
    [
        {},
        {"name": "http"},
        {"name": "http", "port": 0},
        {"name": "http", "port": 65536},
        {"name": "http", "port": -1},
        {"name": None, "port": 8080},
        {"name": "http", "protocol": "ICMP", "port": 8080},
    ],
)
def test_malformed_port_of_a_slice_is_left_out(port: dict[str, Any]) -> None:
    found = encoded(
        service(),
        endpoint_slice(endpoint_json("198.19.0.1"), ports=[port]),
        endpoint_slice(endpoint_json("198.19.0.2"), name="web-2"),
    )
    assert targets(found.ports[0]) == ["198.19.0.2:8080"]


@pytest.mark.parametrize("family", ["FQDN", "", "IPv5"])
def test_slices_of_other_kinds_are_left_out(family: str) -> None:
    found = encoded(service(), endpoint_slice(endpoint_json("198.19.0.1"), family=family))
    assert not found.ports[0].endpoints


def test_malformed_ports_of_a_service_are_left_out() -> None:
    found = encoded(
        service(
            ports=[
                {"name": "none"},
                {"name": "big", "port": 65536},
                {"name": "odd", "port": 80, "protocol": "ICMP"},
                {"name": "http", "port": 80, "nodePort": 70000},
            ]
        ),
        endpoint_slice(endpoint_json("198.19.0.1")),
    )
    assert [(port.name, port.node_port) for port in found.ports] == [("http", 0)]


def test_addresses_are_canonical() -> None:
    found = encoded(
        service(clusterIP="FD00:0018:0::1", clusterIPs=["FD00:0018:0::1"]),
        endpoint_slice(endpoint_json("fd00:18:0:0::00a"), family="IPv6"),
    )
    assert list(found.cluster_ips) == ["fd00:18::1"]
    assert targets(found.ports[0]) == ["fd00:18::a:8080"]
    old = encoded(service(), endpoint_slice(endpoint_json("198.019.000.010")))
    assert targets(old.ports[0]) == ["198.19.0.10:8080"]


def test_five_thousand_endpoints_are_sorted_and_unique() -> None:
    found = [
        endpoint_slice(
            *(
                endpoint_json(f"198.19.{number // 250}.{number % 250 + 1}")
                for number in range(first, first + 100)
            ),
            name=f"web-{first}",
        )
        for first in reversed(range(0, 5000, 100))
    ]
    (port,) = encoded(service(), *found).ports
    assert len(port.endpoints) == 5000
    assert targets(port)[:2] == ["198.19.0.1:8080", "198.19.0.2:8080"]
    assert targets(port)[-1] == "198.19.19.250:8080"


def test_slice_depends_only_on_its_local_pods() -> None:
    read = slices.parse(
        endpoint_slice(
            endpoint_json("198.19.0.1", node=NODE, uid="a"),
            endpoint_json("198.19.0.2", node=NODE),
            endpoint_json("198.19.0.3", uid="c"),
        )
    )
    assert read.local_keys(NODE) == {"a", "198.19.0.2"}
    assert SLICE_PORTS[0]["port"] == read.ports[0].number
