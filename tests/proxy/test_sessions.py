"""Sessions with affinity outlive the process and large changes."""

import asyncio

import pytest

from agent.lab import lab as labs
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.services.proxy import nft_entries, nftables
from agent.services.proxy.frontends import FrontendTable
from tests.proxy import scene
from tests.proxy.conftest import Proxy
from tests.proxy.scene import cluster_ip, endpoints, request, service

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("version", [4, 6])
# Each service's first client gets one of three endpoints: without its session, all of them would
# get the same endpoint again once in 3**12 runs.
SERVICES = 12


def first_answers(version: int) -> list[str]:
    return [request(cluster_ip(version, number)) for number in range(SERVICES)]


def succeed(nft: Proxy, services: list[pb.ServiceEndpoints]) -> None:
    """Another process takes over."""
    nft.backend = nftables.NftBackend()
    asyncio.run(nft.backend.apply(FrontendTable().update(services, ())))


@BOTH
def test_nft_sessions_outlive_the_process(
    nft: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    services = [
        service(f"s{number}", endpoints(*pods), number=number, affinity_seconds=600)
        for number in range(SERVICES)
    ]
    nft.serve_all(services)
    before = first_answers(version)
    succeed(nft, services)
    assert first_answers(version) == before


@BOTH
def test_nft_sessions_outlive_a_service_that_needs_the_whole_table_written_again(
    nft: Proxy, pods: list[labs.LabPod], servers: scene.Servers, version: int
) -> None:
    services = [
        service(f"s{number}", endpoints(*pods), number=number, affinity_seconds=600)
        for number in range(SERVICES)
    ]
    nft.serve_all(services)
    before = first_answers(version)
    many = [
        endpoint
        for port in range(20000, 20001 + nft_entries.READY_COUNTS)
        for endpoint in endpoints(pods[0], port=port)
    ]
    nft.serve(*services, service("many", many, number=SERVICES))
    assert first_answers(version) == before


def test_nft_sessions_of_removed_services_leave_nothing(
    nft: Proxy, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    affine = service("web", endpoints(*pods), affinity_seconds=600)
    plain = service("shop", endpoints(pods[0]), number=1)
    nft.serve(affine, plain)
    request(cluster_ip(4))
    succeed(nft, [plain])
    installed = asyncio.run(nftables.installed())
    assert installed is not None
    assert installed.affinity_sets == set()
    assert not any(name.startswith(("to-", "affinity-")) for name in installed.chains)
    assert request(cluster_ip(4, 1)) == "one"


def test_nft_chains_of_a_removed_service_are_deleted(nft: Proxy, pods: list[labs.LabPod]) -> None:
    nft.serve(service("shop", endpoints(pods[0]), number=1))
    before = asyncio.run(nftables.installed())
    nft.serve(
        service("web", endpoints(*pods), affinity_seconds=600),
        service("shop", endpoints(pods[0]), number=1),
    )
    nft.serve(service("shop", endpoints(pods[0]), number=1))
    assert asyncio.run(nftables.installed()) == before
