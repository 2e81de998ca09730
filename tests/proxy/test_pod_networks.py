"""Which clients are this node's pods: those of --pod-network, and all others are from outside."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.services.linux.iptables import IptablesVariant
from agent.services.proxy import iptables, nftables
from agent.services.proxy.backend import Backend
from bpf.abi import IPNetwork
from tests.kernel import traffic
from tests.proxy import scene
from tests.proxy.conftest import Proxy
from tests.proxy.scene import cluster_ip, endpoints, request, service
from tests.proxy.test_outside import is_dropped

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture(params=["nft", "iptables_nft", "iptables_legacy"])
def proxy(pods: list[labs.LabPod], request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """Its only pods are the second one's addresses."""
    networks = [ipaddress.ip_network(str(address)) for address in pods[1].addresses]
    with scene.routed():
        made = Proxy(asyncio.run(opened(request.param, networks)))
        try:
            yield made
        finally:
            for backend in (nftables, iptables):
                asyncio.run(backend.remove())


async def opened(name: str, networks: list[IPNetwork]) -> Backend:
    if name == "nft":
        return nftables.NftBackend(networks)
    variant = IptablesVariant[name.removeprefix("iptables_").upper()]
    return await iptables.IptablesBackend.open(networks, variant)


@BOTH
def test_local_policy_is_for_clients_that_are_no_pods(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    elsewhere = endpoints(pods[0], is_external=False)
    proxy.serve(service("web", elsewhere, node_port=scene.NODE_PORT, is_local=True))
    place = traffic.NODE[version], scene.NODE_PORT
    assert request(*place, client=pods[1]) == "one"
    assert is_dropped(*place, pods[2])


@BOTH
def test_cluster_ip_hides_the_addresses_of_clients_that_are_no_pods(
    proxy: Proxy, pods: list[labs.LabPod], version: int
) -> None:
    proxy.serve(service("web", endpoints(pods[0])))
    assert seen_by(pods[0], pods[1], version) == traffic.address(pods[1], version)
    assert seen_by(pods[0], pods[2], version) != traffic.address(pods[2], version)


def seen_by(server: labs.LabPod, client: labs.LabPod, version: int) -> str:
    """The client's address, as the endpoint sees it."""
    with (
        server.listen(scene.PORT) as listener,
        client.open_socket(traffic.family(version), socket.SOCK_STREAM) as sock,
    ):
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect((cluster_ip(version), scene.SERVICE_PORT))
        listener.settimeout(traffic.LIMIT_SECONDS)
        peer, (address, *_) = listener.accept()
        peer.close()
    return str(address).removeprefix("::ffff:")
