"""Which endpoints of a port are used; tests/agent/api/upstream has what packets get."""

import ipaddress
import socket
from typing import Any

import pytest

from agent.services.client.v1alpha1 import endpoints_pb2
from agent.services.proxy import frontends
from agent.services.proxy.frontends import Frontend, FrontendChange, FrontendTable, _Endpoints
from bpf.services.tables import ServiceAddress
from tests.agent.services.proxy.making import address


def endpoint(
    text: str, *, is_local: bool = False, is_used: bool = False, is_used_from_node: bool = False
) -> endpoints_pb2.Endpoint:
    return endpoints_pb2.Endpoint(
        address=text,
        port=80,
        is_local=is_local,
        is_internal=is_used,
        is_external=is_used,
        is_external_from_node=is_used_from_node,
    )


def test_local_endpoints_are_those_of_the_node_that_are_used() -> None:
    port = endpoints_pb2.ServicePort(
        endpoints=[
            endpoint("198.18.1.1", is_local=True, is_used=True),
            endpoint("198.18.1.2", is_used_from_node=True),
            endpoint("198.18.1.3", is_local=True),
            endpoint("fd00:18::1", is_local=True, is_used=True),
        ]
    )
    endpoints = _Endpoints(port, socket.IPPROTO_TCP)
    first, second = address("198.18.1.1"), address("198.18.1.2")
    assert endpoints.of(4, False) == ((first,), (first,), frozenset({first}))
    assert endpoints.of(4, True) == ((second,), (first,), frozenset({first}))
    assert endpoints.of(6, False)[2] == {address("fd00:18::1")}


NODE = (ipaddress.ip_address("198.18.5.1"), ipaddress.ip_address("fd00:18:5::1"))
A, B, C, D = (address(f"198.18.0.{number}") for number in range(1, 5))
USED = endpoint("198.19.0.1", is_used=True, is_used_from_node=True)
TARGET = address("198.19.0.1")


def service(name: str = "web", *, port: dict[str, Any] | None = None, **fields: Any) -> Any:
    """With one port and one endpoint."""
    made = endpoints_pb2.ServicePort(
        **{
            "name": "http",
            "protocol": endpoints_pb2.PROTOCOL_TCP,
            "port": 80,
            "endpoints": [USED],
            **(port or {}),
        }
    )
    return endpoints_pb2.ServiceEndpoints(
        **{
            "namespace": "default",
            "name": name,
            "cluster_ips": ["198.18.0.1"],
            "ports": [made],
            **fields,
        }
    )


def frontend(number: int, **fields: Any) -> Frontend:
    return Frontend(port_id=number, endpoints=(), outside=(), local=frozenset(), **fields)


def test_changes_that_follow_each_other_are_one() -> None:
    first = FrontendChange({A: frontend(1), B: frontend(2)}, {C, D})
    second = FrontendChange({B: frontend(3), C: frontend(4)}, {A})
    assert first.then(second) == FrontendChange({B: frontend(3), C: frontend(4)}, {A, D})
    nothing = FrontendChange({}, set())
    assert first.then(nothing) == nothing.then(first) == first


def test_change_of_some_frontends_removes_the_others() -> None:
    change = FrontendChange({A: frontend(1), B: frontend(2, is_external=True)}, {C})
    assert change.of(lambda address, found: found.is_external) == FrontendChange(
        {B: frontend(2, is_external=True)}, {A, C}
    )


def test_service_has_each_of_its_addresses() -> None:
    found = frontends.addresses_of(
        service(
            port={"node_port": 30080},
            cluster_ips=["198.18.0.1"],
            external_ips=["198.18.0.2"],
            load_balancer_ips=["198.18.0.3"],
            load_balancer_source_ranges=["198.18.7.0/24", "fd00:18:7::/64"],
        ),
        NODE,
    )
    (port_id,) = {one.port_id for one in found.values()}
    common: dict[str, Any] = {
        "port_id": port_id,
        "endpoints": (TARGET,),
        "outside": (TARGET,),
        "local": frozenset(),
    }
    node_port = ServiceAddress(NODE[0], 30080, socket.IPPROTO_TCP)
    assert found == {
        A: Frontend(**common),
        B: Frontend(**common, is_external=True),
        C: Frontend(**common, is_external=True, sources=(ipaddress.ip_network("198.18.7.0/24"),)),
        node_port: Frontend(**common, is_external=True),
    }
    assert 0 < port_id < 1 << 64


@pytest.mark.parametrize(
    "spec",
    [
        {"is_headless": True},
        {"cluster_ips": []},
        {"ports": []},
        {"port": {"protocol": endpoints_pb2.PROTOCOL_UNSPECIFIED}},
    ],
    ids=str,
)
def test_service_without_an_address_or_a_port_has_no_frontend(spec: dict[str, Any]) -> None:
    assert frontends.addresses_of(service(**spec), NODE) == {}


def test_port_without_a_protocol_affects_no_other() -> None:
    made = service()
    made.ports.insert(0, endpoints_pb2.ServicePort(port=1))
    assert list(frontends.addresses_of(made, NODE)) == [A]


def test_ports_of_services_differ_in_their_ids() -> None:
    made = [
        service(),
        service("db"),
        service(namespace="shop"),
        service(port={"name": "https"}),
        service(port={"protocol": endpoints_pb2.PROTOCOL_UDP}),
    ]
    ids = {one.port_id for each in made for one in frontends.addresses_of(each, ()).values()}
    assert len(ids) == 5
    two = service(cluster_ips=["198.18.0.1", "fd00:18::1"], external_ips=["198.18.0.2"])
    assert len({one.port_id for one in frontends.addresses_of(two, ()).values()}) == 1


@pytest.mark.parametrize(
    ("affinity", "seconds"),
    [
        (endpoints_pb2.SESSION_AFFINITY_CLIENT_IP, 60),
        (endpoints_pb2.SESSION_AFFINITY_NONE, 0),
        (endpoints_pb2.SESSION_AFFINITY_UNSPECIFIED, 0),
    ],
)
def test_affinity_is_of_client_ips_only(affinity: int, seconds: int) -> None:
    made = service(session_affinity=affinity, session_affinity_timeout_seconds=60)
    (found,) = frontends.addresses_of(made, ()).values()
    assert found.affinity_seconds == seconds


LOCAL = endpoints_pb2.TRAFFIC_POLICY_LOCAL


@pytest.mark.parametrize(
    ("internal", "external", "drops", "preserves"),
    [
        (0, 0, (False, False), (False, False)),
        (LOCAL, 0, (True, False), (False, False)),
        (0, LOCAL, (False, True), (False, True)),
        (LOCAL, LOCAL, (True, True), (False, True)),
    ],
)
@pytest.mark.parametrize("is_anywhere", [False, True])
def test_local_traffic_without_endpoints_is_dropped_where_other_nodes_have_some(
    internal: int,
    external: int,
    drops: tuple[bool, bool],
    preserves: tuple[bool, bool],
    *,
    is_anywhere: bool,
) -> None:
    """Of a cluster IP, and of an external one."""
    made = service(
        port={"endpoints": [], "has_endpoints_anywhere": is_anywhere},
        external_ips=["198.18.0.2"],
        internal_traffic_policy=internal,
        external_traffic_policy=external,
    )
    found = frontends.addresses_of(made, ())
    assert (found[A].drops, found[B].drops) == (drops if is_anywhere else (False, False))
    assert (found[A].preserves_client_ip, found[B].preserves_client_ip) == preserves


@pytest.mark.parametrize(
    ("ranges", "sources"),
    [
        ([], []),
        (["fd00:18:7::/64"], []),
        (["198.18.7.0/24"], ["198.18.7.0/24"]),
        (["198.18.5.0/24"], ["198.18.5.0/24", "198.18.0.3/32"]),
        (["198.18.7.0/24", "198.18.5.1/32"], ["198.18.7.0/24", "198.18.5.1/32", "198.18.0.3/32"]),
        (["198.18.7.0/24", "fd00:18:5::/64"], ["198.18.7.0/24"]),
    ],
)
def test_node_in_the_ranges_of_a_load_balancer_may_use_its_address(
    ranges: list[str], sources: list[str]
) -> None:
    made = service(load_balancer_ips=["198.18.0.3"], load_balancer_source_ranges=ranges)
    found = frontends.addresses_of(made, NODE)
    assert found[C].sources == tuple(map(ipaddress.ip_network, sources))
    assert found[A].sources == ()


def test_only_services_that_differ_change() -> None:
    table = FrontendTable()
    web, db = service(), service("db", cluster_ips=["198.18.0.2"])
    first = table.update([web, db], ())
    assert (set(first.changed), first.removed, table.changed_services) == ({A, B}, set(), 2)
    assert table.update([db, web], ()) == FrontendChange({}, set())
    assert table.changed_services == 0
    # Its message differs, and what it has does not.
    assert table.update([service(uid="new"), db], ()) == FrontendChange({}, set())
    assert table.changed_services == 1
    moved = service(cluster_ips=["198.18.0.3"])
    change = table.update([moved], ())
    assert (list(change.changed), change.removed) == ([C], {A, B})
    assert table.changed_services == 2
    assert table.update([], ()) == FrontendChange({}, {C})
    assert table.update([], ()) == FrontendChange({}, set())


def test_address_of_two_services_is_the_firsts_by_name() -> None:
    table = FrontendTable()
    own = {name: frontends.addresses_of(service(name), ()) for name in ("a", "b", "c")}
    assert table.update([service("b"), service("c")], ()).changed == own["b"]
    assert table.update([service("a"), service("b"), service("c")], ()).changed == own["a"]
    assert table.update([service("a"), service("c")], ()) == FrontendChange({}, set())
    assert table.update([service("c")], ()) == FrontendChange(own["c"], set())
    assert table.update([], ()) == FrontendChange({}, {A})


def test_node_ports_follow_the_addresses_of_the_node() -> None:
    table = FrontendTable()
    made = [
        service(port={"node_port": 30080}, cluster_ips=["198.18.0.1"]),
        service("db", cluster_ips=["198.18.0.2"]),
    ]
    first, second = (ServiceAddress(one, 30080, socket.IPPROTO_TCP) for one in NODE)
    assert set(table.update(made, NODE[:1]).changed) == {A, B, first}
    later = ipaddress.ip_address("198.18.5.2")
    change = table.update(made, [later, NODE[1]])
    assert set(change.changed) == {ServiceAddress(later, 30080, socket.IPPROTO_TCP)}
    assert change.removed == {first}
    assert table.changed_services == 0
    assert second not in change.changed
    assert table.update(made, (later, NODE[1])) == FrontendChange({}, set())
