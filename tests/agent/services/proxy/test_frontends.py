"""Which endpoints of a port are used; tests/agent/api/upstream has what packets get."""

import ipaddress
import socket

from agent.services.client.v1alpha1 import endpoints_pb2
from agent.services.proxy.frontends import _Endpoints
from bpf.services.tables import ServiceAddress


def address(text: str) -> ServiceAddress:
    return ServiceAddress(ipaddress.ip_address(text), 80, socket.IPPROTO_TCP)


def test_local_endpoints_are_those_of_the_node_that_are_used() -> None:
    used = {"is_internal": True, "is_external": True}
    port = endpoints_pb2.ServicePort(
        endpoints=[
            endpoints_pb2.Endpoint(address="198.18.1.1", port=80, is_local=True, **used),
            endpoints_pb2.Endpoint(address="198.18.1.2", port=80, is_external_from_node=True),
            endpoints_pb2.Endpoint(address="198.18.1.3", port=80, is_local=True),
            endpoints_pb2.Endpoint(address="fd00:18::1", port=80, is_local=True, **used),
        ]
    )
    endpoints = _Endpoints(port, socket.IPPROTO_TCP)
    first, second = address("198.18.1.1"), address("198.18.1.2")
    assert endpoints.of(4, False) == ((first,), (first,), {first})
    assert endpoints.of(4, True) == ((second,), (first,), {first})
    assert endpoints.of(6, False)[2] == {address("fd00:18::1")}
