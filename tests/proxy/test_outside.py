"""Clients from outside at node ports, with nft: the addresses that pods see, and source ranges."""

import socket

import pytest

from agent.lab import lab as labs
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


@BOTH
def test_client_is_masqueraded_unless_the_external_policy_is_local(
    nft: Proxy, pods: list[labs.LabPod], version: int
) -> None:
    client = traffic.address(pods[2], version)
    web = endpoints(pods[0])
    nft.serve(service("web", web, node_port=scene.NODE_PORT))
    assert seen_by(pods[0], pods[2], version) != client
    nft.serve(service("web", web, node_port=scene.NODE_PORT, is_local=True))
    assert seen_by(pods[0], pods[2], version) == client


@BOTH
def test_local_policy_without_endpoints_here_drops_external_traffic(
    nft: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    elsewhere = endpoints(pods[0], is_external=False)
    nft.serve(service("web", elsewhere, node_port=scene.NODE_PORT, is_local=True))
    with pods[2].open_socket(traffic.family(version), socket.SOCK_STREAM) as sock:
        sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
        with pytest.raises(TimeoutError):
            sock.connect((traffic.NODE[version], scene.NODE_PORT))
    assert request(traffic.NODE[version], scene.NODE_PORT) == "one"


@BOTH
def test_load_balancer_address_admits_only_its_source_ranges(
    nft: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    web = service("web", endpoints(pods[0]))
    balancer = cluster_ip(version, 9)
    bits = 32 if version == 4 else 128
    web.load_balancer_ips.append(balancer)
    web.load_balancer_source_ranges.append(f"{traffic.address(pods[1], version)}/{bits}")
    nft.serve(web)
    assert request(balancer, client=pods[1]) == "one"
    with pods[2].open_socket(traffic.family(version), socket.SOCK_STREAM) as sock:
        sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
        with pytest.raises(TimeoutError):
            sock.connect((balancer, scene.SERVICE_PORT))
