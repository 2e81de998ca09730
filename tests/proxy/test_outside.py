"""Clients from outside: the addresses that pods see, source ranges, and removed endpoints."""

import contextlib
import socket

import pytest
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

from agent.lab import lab as labs
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.kernel import traffic
from tests.proxy import scene
from tests.proxy.conftest import Proxy
from tests.proxy.scene import cluster_ip, endpoints, request, service

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("version", [4, 6])


def seen_by(server: labs.LabPod, client: labs.LabPod, version: int) -> str:
    """The client's address, as the endpoint sees who comes to the node port."""
    with (
        server.listen(scene.PORT) as listener,
        client.open_socket(traffic.family(version), socket.SOCK_STREAM) as sock,
    ):
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect((traffic.NODE[version], scene.NODE_PORT))
        listener.settimeout(traffic.LIMIT_SECONDS)
        peer, (address, *_) = listener.accept()
        peer.close()
    return str(address).removeprefix("::ffff:")


def is_dropped(address: str, port: int, client: labs.LabPod | None = None) -> bool:
    """Whether a connection gets no answer; what netfilter drops on the way out may be EPERM."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_STREAM
    with client.open_socket(family, kind) if client else socket.socket(family, kind) as sock:
        sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
        try:
            sock.connect((address, port))
        except (TimeoutError, PermissionError):
            return True
        return False


@BOTH
def test_client_is_masqueraded_unless_the_external_policy_is_local(
    proxy: Proxy, pods: list[labs.LabPod], version: int
) -> None:
    client = traffic.address(pods[2], version)
    web = endpoints(pods[0])
    with proxy.outside():
        proxy.serve(service("web", web, node_port=scene.NODE_PORT))
        assert seen_by(pods[0], pods[2], version) != client
        proxy.serve(service("web", web, node_port=scene.NODE_PORT, is_local=True))
        assert seen_by(pods[0], pods[2], version) == client


@BOTH
def test_local_policy_without_endpoints_here_drops_external_traffic(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    elsewhere = endpoints(pods[0], is_external=False)
    proxy.serve(service("web", elsewhere, node_port=scene.NODE_PORT, is_local=True))
    with proxy.outside():
        assert is_dropped(traffic.NODE[version], scene.NODE_PORT, pods[2])
    assert request(traffic.NODE[version], scene.NODE_PORT) == "one"


@BOTH
def test_load_balancer_address_admits_only_its_source_ranges(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    web = service("web", endpoints(pods[0]))
    balancer = cluster_ip(version, 9)
    bits = 32 if version == 4 else 128
    web.load_balancer_ips.append(balancer)
    web.load_balancer_source_ranges.append(f"{traffic.address(pods[1], version)}/{bits}")
    proxy.serve(web)
    for place in (contextlib.nullcontext(), proxy.outside()):
        with place:
            assert request(balancer, client=pods[1]) == "one"
            assert is_dropped(balancer, scene.SERVICE_PORT, pods[2])


@BOTH
def test_source_ranges_of_the_other_family_restrict_nothing(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    web = service("web", endpoints(pods[0]))
    balancer = cluster_ip(version, 9)
    web.load_balancer_ips.append(balancer)
    web.load_balancer_source_ranges.append("198.19.0.0/16" if version == 6 else "fd00:19::/32")
    proxy.serve(web)
    assert request(balancer, client=pods[2]) == "one"


@BOTH
def test_source_ranges_hold_for_the_node_too(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    """As in kube-proxy, whose check is at the output hook, too."""
    balancer = cluster_ip(version, 9)

    def restricted(*clients: str) -> pb.ServiceEndpoints:
        web = service("web", endpoints(pods[0]))
        web.load_balancer_ips.append(balancer)
        bits = 32 if version == 4 else 128
        web.load_balancer_source_ranges.extend(f"{client}/{bits}" for client in clients)
        return web

    client = traffic.address(pods[1], version)
    proxy.serve(restricted(client))
    assert is_dropped(balancer, scene.SERVICE_PORT)
    assert request(balancer, client=pods[1]) == "one"
    proxy.serve(restricted(client, traffic.NODE[version]))
    assert request(balancer) == "one"


@BOTH
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
def test_node_port_leads_clients_from_outside_to_every_endpoint(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int, kind: int
) -> None:
    protocol = pb.PROTOCOL_TCP if kind == socket.SOCK_STREAM else pb.PROTOCOL_UDP
    proxy.serve(service("web", endpoints(*pods[:2]), protocol=protocol, node_port=scene.NODE_PORT))
    with proxy.outside():
        answers = {
            request(traffic.NODE[version], scene.NODE_PORT, kind=kind, client=pods[2])
            for _ in range(40)
        }
    assert answers == {"one", "two"}


@BOTH
def test_client_from_outside_goes_to_another_endpoint_when_its_own_is_gone(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    """One socket, and so one tracked flow."""
    with (
        proxy.outside(),
        pods[2].open_socket(traffic.family(version), socket.SOCK_DGRAM) as sock,
    ):
        sock.settimeout(traffic.LIMIT_SECONDS)
        for pod in pods[:2]:
            proxy.serve(
                service("dns", endpoints(pod), protocol=pb.PROTOCOL_UDP, node_port=scene.NODE_PORT)
            )
            sock.sendto(b"who?", (traffic.NODE[version], scene.NODE_PORT))
            assert sock.recv(100).decode() == pod.name


@BOTH
def test_client_keeps_an_endpoint_that_only_clients_from_outside_use(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    """Policy Local: a terminating pod of this node serves clients from outside, while others have
    ready endpoints elsewhere. A change elsewhere ends no flow."""
    own = endpoints(pods[0])
    for endpoint in own:
        endpoint.is_internal = endpoint.is_external_from_node = False

    def dns(*elsewhere: labs.LabPod) -> pb.ServiceEndpoints:
        return service(
            "dns",
            [*own, *endpoints(*elsewhere, is_external=False)],
            protocol=pb.PROTOCOL_UDP,
            node_port=scene.NODE_PORT,
            is_local=True,
        )

    proxy.serve(dns(pods[1]))
    place = traffic.NODE[version], scene.NODE_PORT
    with (
        proxy.outside(),
        pods[2].open_socket(traffic.family(version), socket.SOCK_DGRAM) as sock,
    ):
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.sendto(b"who?", place)
        assert sock.recv(100) == b"one"
        flows = conntracked(place)
        assert flows
        proxy.serve(dns(*pods[1:]))
        assert conntracked(place) == flows


def conntracked(place: tuple[str, int]) -> set[tuple[str, int]]:
    """The clients of an address, by connection tracking."""
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with NFCTSocket(nfgen_family=family) as netlink:
        originals = [
            NFCTAttrTuple.from_netlink(family, entry.get_attr("CTA_TUPLE_ORIG"))
            for entry in netlink.dump(
                tuple_orig=NFCTAttrTuple(family=family, proto=socket.IPPROTO_UDP, dport=place[1])
            )
        ]
    return {(flow.saddr, flow.sport) for flow in originals if flow.daddr == place[0]}
