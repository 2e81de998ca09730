"""SCTP services, by the first two packets of an association."""

from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.kernel import traffic
from tests.proxy import scene, sctp
from tests.proxy.conftest import Proxy
from tests.proxy.scene import cluster_ip, endpoints, service

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("version", [4, 6])
TURNS = 30


@pytest.fixture
def sctp_servers(pods: list[labs.LabPod]) -> Iterator[None]:
    made = sctp.Server(pods[:2])
    yield
    made.close()


@BOTH
def test_sctp_cluster_ip_leads_pods_and_node_to_every_endpoint(
    proxy: Proxy, pods: list[labs.LabPod], sctp_servers: None, version: int
) -> None:
    proxy.serve(service("core", endpoints(*pods[:2]), protocol=pb.PROTOCOL_SCTP))
    for client in (None, pods[2]):
        answers = {
            sctp.request(cluster_ip(version), scene.SERVICE_PORT, client=client)
            for _ in range(TURNS)
        }
        assert answers == {"one", "two"}


@BOTH
def test_sctp_node_port_leads_there_from_outside(
    proxy: Proxy, pods: list[labs.LabPod], sctp_servers: None, version: int
) -> None:
    wanted = service(
        "core", endpoints(pods[0]), protocol=pb.PROTOCOL_SCTP, node_port=scene.NODE_PORT
    )
    proxy.serve(wanted)
    address = traffic.NODE[version]
    with proxy.outside():
        assert sctp.request(address, scene.NODE_PORT, client=pods[2]) == "one"


@BOTH
def test_sctp_client_with_affinity_keeps_its_endpoint(
    proxy: Proxy, pods: list[labs.LabPod], sctp_servers: None, version: int
) -> None:
    proxy.serve(
        service("core", endpoints(*pods[:2]), protocol=pb.PROTOCOL_SCTP, affinity_seconds=600)
    )
    answers = {
        sctp.request(cluster_ip(version), scene.SERVICE_PORT, client=pods[2]) for _ in range(TURNS)
    }
    assert len(answers) == 1


@BOTH
def test_sctp_without_endpoints_is_rejected(
    proxy: Proxy, pods: list[labs.LabPod], version: int
) -> None:
    proxy.serve(service("core", [], protocol=pb.PROTOCOL_SCTP))
    with pytest.raises((ConnectionRefusedError, PermissionError)):
        sctp.request(cluster_ip(version), scene.SERVICE_PORT, client=pods[2])
