"""Ten thousand services: all of them are reached, and one change is a small one."""

import subprocess

import pytest

from agent.lab import lab as labs
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.services.proxy import nft_scripts
from agent.services.proxy.backend import BackendError
from bpf.services import services
from tests.proxy import scene
from tests.proxy.conftest import Proxy
from tests.proxy.scene import cluster_ip, endpoints, request, service

pytestmark = pytest.mark.kernel

COUNT = 8000  # as many as have addresses in the test's network; both families: 16,000 places


def test_many_services_are_all_there_and_change_one_by_one(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    two = endpoints(*pods[:2])
    crowd = [service(f"s{number}", two, number=number) for number in range(COUNT)]
    proxy.serve_all(crowd)
    for number in (0, 1, COUNT // 2, COUNT - 1):
        assert request(cluster_ip(4, number)) in {"one", "two"}
        assert request(cluster_ip(6, number)) in {"one", "two"}
    crowd[5] = service("s5", endpoints(pods[2]), number=5)
    proxy.serve_all(crowd)
    assert request(cluster_ip(4, 5)) == "three"
    assert request(cluster_ip(4, 6)) in {"one", "two"}


def test_service_with_thousands_of_endpoints_uses_them(
    proxy: Proxy, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    """All but those of one pod are ports without a listener: the client finds the pod."""
    many = [
        pb.Endpoint(
            address=pods[0].ipv4,
            port=port,
            is_internal=True,
            is_external=True,
            is_external_from_node=True,
        )
        for port in range(20000, 25000)
    ]
    proxy.serve(service("big", many))
    with pytest.raises(ConnectionRefusedError):
        request(cluster_ip(4))
    proxy.serve(service("big", [*many[:3], *endpoints(pods[0])]))
    assert "one" in {answer(cluster_ip(4)) for _ in range(100)}


def answer(address: str) -> str:
    try:
        return request(address)
    except ConnectionRefusedError:
        return ""


def test_too_many_endpoints_change_nothing(
    ebpf: Proxy,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ebpf.serve(service("web", endpoints(pods[0])))
    monkeypatch.setattr(services, "MAX_ENDPOINTS", 5)
    with pytest.raises(BackendError, match="room for 5"):
        ebpf.serve(service("web", endpoints(pods[0])), service("x", endpoints(*pods), number=1))
    assert request(cluster_ip(4)) == "one"


def test_removed_table_is_complete_after_two_changes(
    nft: Proxy, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    """`nft flush ruleset`, as a restart of nftables.service does it, takes ours along."""
    web = service("web", endpoints(pods[0]))
    nft.serve(web)
    subprocess.run(["nft", "delete", "table", "inet", nft_scripts.TABLE], check=True)
    with pytest.raises(BackendError):
        nft.serve(web, service("other", endpoints(pods[1]), number=1))
    nft.serve(web, service("third", endpoints(pods[2]), number=2))
    assert request(cluster_ip(4)) == "one"
    assert request(cluster_ip(4, 2)) == "three"
