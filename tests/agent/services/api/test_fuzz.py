"""Whatever the API server may send, nothing of it ends the agent."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.services.api import objects, stream_items
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.services.api.making import NODE, selected

ADDRESSES = st.sampled_from(
    ("198.19.0.1", "fd00:18::1", "None", "", "::ffff:198.19.0.1", "1.2.3", "0" * 99, "é.1.2.3", ".")
)
TEXTS = st.sampled_from(("", "http", "TCP", "UDP", "Local", "ClientIP", "\x00", "é", "IPv4", NODE))
NUMBERS = st.sampled_from((0, 1, 80, 65535, 65536, -1, 1 << 31, 1 << 62))
FLAGS = st.sampled_from((None, False, True))


def lists(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | st.lists(of, max_size=3)


def thing(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


PORTS = thing(
    name=TEXTS, protocol=TEXTS, port=NUMBERS, nodePort=NUMBERS, appProtocol=st.none() | TEXTS
)
SPECS = thing(
    type=st.sampled_from(("ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "x")),
    clusterIP=ADDRESSES,
    externalName=st.none() | TEXTS,
    clusterIPs=lists(ADDRESSES),
    externalIPs=lists(ADDRESSES),
    loadBalancerSourceRanges=lists(ADDRESSES),
    ports=lists(PORTS),
    sessionAffinity=TEXTS,
    sessionAffinityConfig=st.none()
    | thing(clientIP=st.none() | thing(timeoutSeconds=st.none() | NUMBERS)),
    internalTrafficPolicy=st.none() | TEXTS,
    externalTrafficPolicy=st.none() | TEXTS,
    healthCheckNodePort=NUMBERS,
    publishNotReadyAddresses=st.booleans(),
)
ENDPOINTS = thing(
    addresses=lists(ADDRESSES),
    conditions=thing(ready=FLAGS, serving=FLAGS, terminating=FLAGS),
    hostname=st.none() | TEXTS,
    nodeName=st.none() | TEXTS,
    zone=st.none() | TEXTS,
    targetRef=st.none() | thing(kind=TEXTS | st.just("Pod"), uid=TEXTS, name=TEXTS),
    hints=st.none() | thing(forZones=lists(thing(name=TEXTS)), forNodes=lists(thing(name=TEXTS))),
)
SLICES = thing(
    addressType=st.sampled_from(("IPv4", "IPv6", "FQDN", "")),
    ports=lists(thing(name=st.none() | TEXTS, protocol=st.none() | TEXTS, port=NUMBERS)),
    endpoints=lists(ENDPOINTS),
)
METADATA = {"namespace": "default", "name": "web"}
REQUESTS = thing(
    types=lists(st.sampled_from((1, 2, 3, 4))),
    families=lists(st.sampled_from((1, 2))),
    label_patterns=lists(st.sampled_from(("*", "a*b*"))),
    all_endpoints=st.booleans(),
    endpoint_details=st.booleans(),
)


@given(spec=SPECS, found=st.lists(SLICES, max_size=3), request=REQUESTS)
def test_everything_that_can_be_decoded_can_be_encoded(
    spec: dict[str, Any], found: list[dict[str, Any]], request: dict[str, Any]
) -> None:
    service = msgspec.convert({"metadata": METADATA, "spec": spec}, objects.ApiService)
    slices = (
        msgspec.convert({"metadata": METADATA, **one}, objects.EndpointSlice) for one in found
    )
    told = selected(service, *slices, **request)
    if told is None:
        return
    for port in told.ports:
        addresses = [(one.address, one.port) for one in port.endpoints]
        assert len(addresses) == len(set(addresses))
        used = [one for one in port.endpoints if one.is_internal or one.is_external]
        assert port.has_endpoints_anywhere or not used


@pytest.mark.parametrize("count", [0, 1, 3, 500])
def test_parts_are_the_services_in_order(count: int) -> None:
    services = [pb.ServiceEndpoints(name=f"{number:0400}") for number in range(count)]
    parts = [
        pb.NextItem.FromString(one)
        for one in stream_items.parts(map(stream_items.element, services))
    ]
    assert [one for part in parts for one in part.services.items] == services
    assert len(parts) == (count * 406 + 65535) // 65536
