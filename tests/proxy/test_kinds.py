"""Every kind of service, by real connections, with each backend."""

import errno
import socket
import time

import pytest

from agent.lab import lab as labs
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests import polling
from tests.kernel import traffic
from tests.proxy import scene
from tests.proxy.conftest import Proxy
from tests.proxy.scene import cluster_ip, endpoints, request, service

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("version", [4, 6])
KINDS = pytest.mark.parametrize(
    ("kind", "protocol"),
    [(socket.SOCK_STREAM, pb.PROTOCOL_TCP), (socket.SOCK_DGRAM, pb.PROTOCOL_UDP)],
    ids=["tcp", "udp"],
)
TURNS = 40


@BOTH
@KINDS
def test_cluster_ip_leads_node_and_pods_to_every_endpoint(
    proxy: Proxy,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    kind: int,
    protocol: "pb.Protocol",
    version: int,
) -> None:
    proxy.serve(service("web", endpoints(*pods[:2]), protocol=protocol))
    address = cluster_ip(version)
    for client in (None, pods[2]):
        answers = {request(address, kind=kind, client=client) for _ in range(TURNS)}
        assert answers == {"one", "two"}


@BOTH
@KINDS
def test_node_port_leads_there_from_node_and_pods(
    proxy: Proxy,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    kind: int,
    protocol: "pb.Protocol",
    version: int,
) -> None:
    wanted = endpoints(*pods[:2])
    proxy.serve(service("web", wanted, protocol=protocol, node_port=scene.NODE_PORT))
    for client in (None, pods[2]):
        answers = {
            request(traffic.NODE[version], scene.NODE_PORT, kind=kind, client=client)
            for _ in range(TURNS)
        }
        assert answers == {"one", "two"}


@BOTH
@KINDS
def test_pod_reaches_itself_by_its_service(
    proxy: Proxy,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    kind: int,
    protocol: "pb.Protocol",
    version: int,
) -> None:
    proxy.serve(service("web", endpoints(pods[0]), protocol=protocol))
    assert request(cluster_ip(version), kind=kind, client=pods[0]) == "one"


@BOTH
@KINDS
def test_connected_socket_sees_the_service_as_its_peer(
    proxy: Proxy,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    kind: int,
    protocol: "pb.Protocol",
    version: int,
) -> None:
    proxy.serve(service("web", endpoints(pods[0]), protocol=protocol))
    service_address = cluster_ip(version), scene.SERVICE_PORT
    with socket.socket(traffic.family(version), kind) as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect(service_address)
        assert sock.getpeername()[:2] == service_address
        if kind == socket.SOCK_DGRAM:  # a server that has closed resets a connection that sends
            sock.send(b"who?")
        answer, sender = sock.recvfrom(100)
        assert answer == b"one"
        if kind == socket.SOCK_DGRAM:
            assert sender[:2] == service_address


def test_ipv6_socket_reaches_a_mapped_address(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    proxy.serve(service("web", endpoints(pods[0])))
    assert request(f"::ffff:{cluster_ip(4)}") == "one"


@BOTH
def test_socket_goes_to_another_endpoint_when_its_own_is_gone(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    """The same socket, and so the same port: netfilter would continue with the old translation."""
    proxy.serve(service("dns", endpoints(pods[0]), protocol=pb.PROTOCOL_UDP))
    with socket.socket(traffic.family(version), socket.SOCK_DGRAM) as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        for pod in pods[:2]:
            proxy.serve(service("dns", endpoints(pod), protocol=pb.PROTOCOL_UDP))
            sock.sendto(b"who?", (cluster_ip(version), scene.SERVICE_PORT))
            assert sock.recv(100).decode() == pod.name


@BOTH
def test_socket_that_does_not_connect_stays_with_its_endpoint(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    proxy.serve(service("dns", endpoints(*pods), protocol=pb.PROTOCOL_UDP))
    with socket.socket(traffic.family(version), socket.SOCK_DGRAM) as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        answers = set()
        for _ in range(TURNS):
            sock.sendto(b"who?", (cluster_ip(version), scene.SERVICE_PORT))
            answers.add(sock.recv(100))
    assert len(answers) == 1


@BOTH
@KINDS
def test_client_with_affinity_stays_with_its_endpoint_by_every_address(
    proxy: Proxy,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    kind: int,
    protocol: "pb.Protocol",
    version: int,
) -> None:
    proxy.need("one endpoint for a client by every address")
    wanted = service(
        "web",
        endpoints(*pods),
        protocol=protocol,
        affinity_seconds=600,
        node_port=scene.NODE_PORT,
    )
    proxy.serve(wanted)
    first = request(cluster_ip(version), kind=kind, client=pods[2])
    for _ in range(TURNS):
        assert request(cluster_ip(version), kind=kind, client=pods[2]) == first
    other_way = request(traffic.NODE[version], scene.NODE_PORT, kind=kind, client=pods[2])
    assert other_way == first


@BOTH
def test_affinity_ends_with_its_endpoint_and_not_with_another(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    proxy.serve(service("web", endpoints(*pods), affinity_seconds=600))
    first = request(cluster_ip(version))
    others = [pod for pod in pods if pod.name != first]
    (own,) = (pod for pod in pods if pod.name == first)
    proxy.serve(service("web", endpoints(own, others[0]), affinity_seconds=600))
    assert {request(cluster_ip(version)) for _ in range(TURNS)} == {first}
    proxy.serve(service("web", endpoints(*others), affinity_seconds=600))
    (second,) = {request(cluster_ip(version)) for _ in range(TURNS)}
    assert second != first


def test_affinity_ends_with_its_time(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    """The shortest there is: one second."""
    proxy.need("affinity that ends with its time")
    proxy.serve(service("web", endpoints(*pods), affinity_seconds=1))
    first = request(cluster_ip(4))

    def is_another() -> bool:
        time.sleep(1.1)
        return request(cluster_ip(4)) != first

    polling.wait_until("another endpoint", is_another)


def converse(sock: socket.socket, place: tuple[str, int]) -> None:
    sock.settimeout(traffic.LIMIT_SECONDS)
    sock.connect(place)
    sock.send(b"who?")
    sock.recv(100)


@BOTH
@KINDS
def test_service_without_endpoints_rejects_at_once(
    proxy: Proxy,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    kind: int,
    protocol: "pb.Protocol",
    version: int,
) -> None:
    proxy.serve(service("web", [], protocol=protocol, node_port=scene.NODE_PORT))
    places = ((cluster_ip(version), scene.SERVICE_PORT), (traffic.NODE[version], scene.NODE_PORT))
    for place in places:
        for client in (None, pods[0]):
            family = traffic.family(version)
            sock = client.open_socket(family, kind) if client else socket.socket(family, kind)
            with sock, pytest.raises((ConnectionRefusedError, PermissionError)) as refused:
                converse(sock, place)
            # What netfilter drops on the way out is EPERM to who sends a datagram.
            assert refused.type is ConnectionRefusedError or kind == socket.SOCK_DGRAM


@BOTH
def test_node_and_its_pods_reach_endpoints_elsewhere_whatever_the_external_policy(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    """As kube-proxy has it: externalTrafficPolicy Local is for who comes from outside."""
    elsewhere = endpoints(pods[0], is_external=False)
    proxy.serve(service("web", elsewhere, node_port=scene.NODE_PORT, is_local=True))
    assert request(traffic.NODE[version], scene.NODE_PORT) == "one"


@BOTH
def test_family_without_endpoints_is_rejected_and_the_other_is_not(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    own = [e for e in endpoints(pods[0]) if (":" in e.address) == (version == 6)]
    proxy.serve(service("web", own))
    assert request(cluster_ip(version)) == "one"
    with pytest.raises(ConnectionRefusedError):
        request(cluster_ip(10 - version))


@BOTH
def test_other_traffic_is_not_translated(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    proxy.serve(service("web", endpoints(pods[0]), node_port=scene.NODE_PORT))
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        assert request(traffic.address(pods[1], version), scene.PORT, kind=kind) == "two"
    with socket.socket(traffic.family(version), socket.SOCK_STREAM) as sock:
        assert sock.connect_ex((traffic.NODE[version], 30081)) == errno.ECONNREFUSED


@BOTH
def test_deleted_service_is_not_translated(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    web = service("web", endpoints(pods[0]), node_port=scene.NODE_PORT)
    proxy.serve(web, service("shop", endpoints(pods[1]), number=1))
    proxy.serve(service("shop", endpoints(pods[1]), number=1))
    assert request(cluster_ip(version, 1)) == "two"
    with pytest.raises(ConnectionRefusedError):
        request(traffic.NODE[version], scene.NODE_PORT)
    proxy.serve(web)
    assert request(traffic.NODE[version], scene.NODE_PORT) == "one"
