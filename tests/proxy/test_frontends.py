"""Frontends, and their changes from one state to the next."""

import ipaddress
import socket
from typing import Any

from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.services.proxy.frontends import Frontend, FrontendChange, FrontendTable
from bpf.services.tables import ServiceAddress

NODE = (ipaddress.ip_address("198.18.0.1"), ipaddress.ip_address("fd00:18::1"))


def place(text: str, port: int, protocol: int = socket.IPPROTO_TCP) -> ServiceAddress:
    return ServiceAddress(ipaddress.ip_address(text), port, protocol)


def endpoint(address: str, **more: Any) -> pb.Endpoint:
    told: dict[str, Any] = {
        "is_internal": True,
        "is_external": True,
        "is_external_from_node": True,
    } | more
    return pb.Endpoint(address=address, port=8080, **told)


def service(
    name: str = "web",
    *endpoints: pb.Endpoint,
    protocol: "pb.Protocol" = pb.PROTOCOL_TCP,
    node_port: int = 0,
    **more: Any,
) -> pb.ServiceEndpoints:
    port = pb.ServicePort(
        protocol=protocol,
        port=80,
        node_port=node_port,
        endpoints=endpoints or (endpoint("198.18.1.1"), endpoint("fd00:18:0:1::1")),
        has_endpoints_anywhere=True,
    )
    told: dict[str, Any] = {"cluster_ips": ["198.18.96.1", "fd00:18:96::1"], "ports": [port]} | more
    return pb.ServiceEndpoints(namespace="shop", name=name, **told)


def first(*services: pb.ServiceEndpoints) -> dict[ServiceAddress, Frontend]:
    return FrontendTable().update(services, NODE).changed


def test_each_family_has_its_own_endpoints() -> None:
    found = first(service())
    assert {key: one.endpoints for key, one in found.items()} == {
        place("198.18.96.1", 80): (place("198.18.1.1", 8080),),
        place("fd00:18:96::1", 80): (place("fd00:18:0:1::1", 8080),),
    }


def test_node_ports_are_at_every_address_of_the_node() -> None:
    found = first(service(node_port=30080))
    external = {key for key, one in found.items() if one.is_external}
    assert external == {place("198.18.0.1", 30080), place("fd00:18::1", 30080)}


def test_all_addresses_of_a_port_share_affinity() -> None:
    found = first(service(node_port=30080), service("other", cluster_ips=["198.18.96.2"]))
    ids = {one.port_id for one in found.values()}
    assert len(ids) == 2
    assert 0 not in ids


def test_internal_and_external_endpoints_follow_the_api() -> None:
    found = first(
        service(
            "web",
            endpoint("198.18.1.1", is_external=False),
            endpoint("198.18.1.2", is_internal=False, is_local=True),
            node_port=30080,
            external_traffic_policy=pb.TRAFFIC_POLICY_LOCAL,
        )
    )
    cluster, node = found[place("198.18.96.1", 80)], found[place("198.18.0.1", 30080)]
    assert cluster.endpoints == cluster.outside == (place("198.18.1.1", 8080),)
    assert node.endpoints == (place("198.18.1.1", 8080), place("198.18.1.2", 8080))
    assert node.outside == (place("198.18.1.2", 8080),)
    assert node.local == {place("198.18.1.2", 8080)}
    assert node.preserves_client_ip
    assert node.drops
    assert not cluster.drops


def test_only_load_balancer_addresses_have_sources() -> None:
    found = first(
        service(
            external_ips=["198.18.97.1"],
            load_balancer_ips=["198.18.97.2"],
            load_balancer_source_ranges=["198.18.128.0/24"],
        )
    )
    ranged = {key for key, one in found.items() if one.sources}
    assert ranged == {place("198.18.97.2", 80)}


def test_headless_services_have_no_frontends() -> None:
    assert first(service(is_headless=True)) == {}


def test_sctp_has_frontends() -> None:
    found = first(service(protocol=pb.PROTOCOL_SCTP))
    assert {address.protocol for address in found} == {socket.IPPROTO_SCTP}


def test_affinity_timeout_without_client_ip_is_ignored() -> None:
    found = first(service(session_affinity_timeout_seconds=10))
    assert {one.affinity_seconds for one in found.values()} == {0}


def test_unchanged_services_are_not_in_the_change() -> None:
    table = FrontendTable()
    table.update([service(), service("other", cluster_ips=["198.18.96.2"])], NODE)
    change = table.update([service(), service("other", cluster_ips=["198.18.96.3"])], NODE)
    assert change.changed.keys() == {place("198.18.96.3", 80)}
    assert change.removed == {place("198.18.96.2", 80)}


def test_changed_node_addresses_move_the_node_ports() -> None:
    table = FrontendTable()
    table.update([service(node_port=30080)], NODE)
    change = table.update([service(node_port=30080)], NODE[:1])
    assert change == FrontendChange({}, {place("fd00:18::1", 30080)})


def test_first_service_by_name_gets_a_shared_address() -> None:
    shared = place("198.18.97.1", 80)
    one, two = (
        service(name, endpoint(address), cluster_ips=(), external_ips=["198.18.97.1"])
        for name, address in (("a", "198.18.1.1"), ("b", "198.18.1.2"))
    )
    table = FrontendTable()
    assert table.update([two], NODE).changed[shared].endpoints == (place("198.18.1.2", 8080),)
    assert table.update([one, two], NODE).changed[shared].endpoints == (place("198.18.1.1", 8080),)
    assert table.update([two], NODE).changed[shared].endpoints == (place("198.18.1.2", 8080),)
    assert table.update([], NODE) == FrontendChange({}, {shared})


def test_failed_changes_are_merged_with_the_next_ones() -> None:
    table = FrontendTable()
    pending = table.update([service(cluster_ips=["198.18.96.1"])], NODE)
    pending = pending.then(table.update([service(cluster_ips=["198.18.96.2"])], NODE))
    assert pending.changed.keys() == {place("198.18.96.2", 80)}
    assert pending.removed == {place("198.18.96.1", 80)}
    back = pending.then(table.update([service(cluster_ips=["198.18.96.1"])], NODE))
    assert back.changed.keys() == {place("198.18.96.1", 80)}
    assert back.removed == {place("198.18.96.2", 80)}
