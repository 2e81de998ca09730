"""Which endpoints of a port are used; tests/agent/api/upstream has what packets get."""

import ipaddress
import socket

from agent.services.client.v1alpha1 import endpoints_pb2
from agent.services.proxy.frontends import _Endpoints
from bpf.services.tables import ServiceAddress


def address(text: str) -> ServiceAddress:
    return ServiceAddress(ipaddress.ip_address(text), 80, socket.IPPROTO_TCP)


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
