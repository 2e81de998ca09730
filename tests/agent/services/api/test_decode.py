"""Messages that become objects again: what is sent of these is the same."""

import contextlib
from typing import Any

import msgspec
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from agent.services.api import decode, encode, filters, objects, slices
from agent.services.api.topology import NodeTopology
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.services.api.making import Json, endpoint_json, endpoint_slice, service

EVERYTHING = filters.read(decode.complete_filter())


def message(one: Any, found: list[Any], node: str = "a", zone: str = "za") -> pb.ServiceEndpoints:
    parsed = [slices.parse(each) for each in found]
    made = encode.encode_service(one, parsed, NodeTopology(node, zone), EVERYTHING.form)
    assert made is not None
    return made


names = st.sampled_from(["a", "b", ""])
booleans = st.booleans()


@st.composite
def endpoints(draw: st.DrawFn, family: str) -> list[Json]:
    found = []
    for number in sorted(draw(st.sets(st.integers(1, 9), max_size=4))):
        ready, terminating = draw(booleans), draw(booleans)
        made = endpoint_json(
            f"198.19.0.{number}" if family == "IPv4" else f"fd00:18::{number}",
            node=draw(names) or None,
            ready=ready and not terminating,
            serving=ready or draw(booleans),
            terminating=terminating,
            zones=draw(st.lists(names.filter(bool), max_size=2, unique=True)) or None,
            uid=draw(names),
        )
        made["hostname"] = draw(names) or None
        made["zone"] = draw(names) or None
        found.append(made)
    return found


@st.composite
def states(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    """A service of any kind, with slices."""
    kind = draw(st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]))
    is_headless = kind == "ClusterIP" and draw(booleans)
    families = draw(st.sampled_from([["IPv4"], ["IPv6"], ["IPv4", "IPv6"]]))
    addresses = {"IPv4": "198.18.0.1", "IPv6": "fd00:18::ffff"}
    count = draw(st.integers(0 if is_headless else 1, 2))
    ports: list[Json] = [
        {
            "name": name,
            "protocol": draw(st.sampled_from(["TCP", "UDP", "SCTP"])),
            "port": 80 + number,
            "nodePort": 30000 + number if kind in ("NodePort", "LoadBalancer") else 0,
            "appProtocol": draw(names) or None,
        }
        for number, name in enumerate(["http", "dns"][:count])
    ]
    spec: Json = {
        "type": kind,
        "ports": ports,
        "clusterIPs": ["None"] if is_headless else [addresses[one] for one in families],
        "externalIPs": draw(st.sampled_from([None, ["198.18.9.1", "fd00:18:9::1"]])),
        "sessionAffinity": draw(st.sampled_from(["None", "ClientIP"])),
        "sessionAffinityConfig": draw(
            st.sampled_from([None, {"clientIP": {"timeoutSeconds": 60}}])
        ),
        "internalTrafficPolicy": draw(st.sampled_from(["Cluster", "Local"])),
        "externalTrafficPolicy": draw(st.sampled_from(["Cluster", "Local"])),
        "healthCheckNodePort": draw(st.sampled_from([0, 31000])),
        "publishNotReadyAddresses": draw(booleans),
        "loadBalancerSourceRanges": draw(st.sampled_from([None, ["198.18.0.0/16"]])),
        "status": {
            "loadBalancer": {
                "ingress": [
                    {"ip": "198.18.8.1", "ipMode": draw(st.sampled_from(["VIP", "Proxy"]))},
                    {"hostname": "lb.example"},
                ]
            }
        },
    }
    if kind == "ExternalName":
        spec |= {"clusterIPs": None, "clusterIP": "", "externalName": "db.example"}
    labels = {"app": "web"}
    if draw(booleans):
        labels["service.kubernetes.io/service-proxy-name"] = "other"
    one = service(labels=labels, **spec)
    if kind == "ExternalName":
        return one, []
    slice_ports = [{**port, "port": 8000 + number} for number, port in enumerate(ports)]
    found = [
        managed_by(
            draw(st.sampled_from([objects.PODS_CONTROLLER, "staff"])),
            endpoint_slice(
                *draw(endpoints(family)), name=f"web-{family}", family=family, ports=slice_ports
            ),
        )
        for family in families
    ]
    return one, found


def managed_by(manager: str, found: objects.EndpointSlice) -> objects.EndpointSlice:
    labels = {**found.metadata.labels, objects.MANAGER_LABEL: manager}
    metadata = msgspec.structs.replace(found.metadata, labels=labels)
    return msgspec.structs.replace(found, metadata=metadata)


@given(states(), st.sampled_from(["a", "b", "c"]), st.sampled_from(["a", "b", ""]))
def test_what_a_node_uses_is_the_same_by_way_of_another_podgate(
    state: tuple[Any, list[Any]], node: str, zone: str
) -> None:
    one, found = state
    sent = message(one, found, node="server", zone="b")
    again, again_found = decode.decode_service(sent)
    assert message(again, list(again_found), node, zone) == message(one, found, node, zone)
    assert message(again, list(again_found), "server", "b") == sent


@pytest.mark.parametrize("manager", [objects.PODS_CONTROLLER, "staff"])
def test_readiness_of_a_node_counts_behind_a_hub_as_at_the_api_server(manager: str) -> None:
    one = service()
    found = managed_by(manager, endpoint_slice(endpoint_json("198.19.0.1", node="a")))
    _, decoded = decode.decode_service(message(one, [found], node="server"))
    for each in (found, *decoded):
        (used,) = slices.parse(each).with_readiness("a", lambda uid, address: False).candidates
        assert used.is_ready is (manager == "staff")


def test_labels_and_annotations_are_decoded() -> None:
    one = service(labels={"app": "web"})
    again, _ = decode.decode_service(message(one, []))
    assert again.metadata.labels == {"app": "web"}


def test_names_of_an_endpoint_are_decoded() -> None:
    given = endpoint_json("198.19.0.1", node="a", zones=["za", "zb"], uid="uid-db-0")
    given |= {"hostname": "db-0", "zone": "za"}
    for found in (endpoint_slice(given), endpoint_slice(endpoint_json("198.19.0.2"))):
        headless = service(clusterIP="None", clusterIPs=["None"])
        _, (decoded,) = decode.decode_service(message(headless, [found]))
        (before,), (after,) = found.endpoints or (), decoded.endpoints or ()
        for name in ("addresses", "hostname", "node_name", "zone", "target_ref", "hints"):
            assert getattr(after, name) == getattr(before, name), name


def test_endpoint_without_details_is_rejected() -> None:
    found = endpoint_slice(endpoint_json("198.19.0.1"))
    sent = message(service(), [found])
    sent.ports[0].endpoints[0].ClearField("conditions")
    with pytest.raises(decode.MessageError, match=r"default/web has an endpoint '198\.19\.0\.1'"):
        decode.decode_service(sent)


@given(st.binary(max_size=200))
def test_any_message_is_decoded_or_rejected(content: bytes) -> None:
    with contextlib.suppress(DecodeError, decode.MessageError):
        decode.decode_service(pb.ServiceEndpoints.FromString(content))


def test_every_service_and_endpoint_is_requested_with_all_details() -> None:
    request = decode.complete_filter(3, 7)
    assert (request.instance_id, request.rev) == (3, 7)
    assert request.all_endpoints
    assert request.endpoint_details
    assert [*request.label_patterns, *request.annotation_patterns] == ["*", "*"]
