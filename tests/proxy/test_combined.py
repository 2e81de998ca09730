"""The eBPF proxy's two parts: which of them has what, and a node without nft."""

import asyncio
import contextlib

import pytest
import structlog.testing

from agent.client.v1alpha1 import endpoints_pb2 as pb
from agent.lab import lab as labs
from agent.proxy import nftables
from agent.proxy.combined import CombinedBackend
from bpf import pins
from bpf.services import links as service_links
from tests.kernel import cgroups, traffic
from tests.proxy import conftest, scene
from tests.proxy.conftest import Proxy
from tests.proxy.scene import cluster_ip, endpoints, request, service

pytestmark = pytest.mark.kernel


def installed_maps() -> set[str] | None:
    table = asyncio.run(nftables.installed())
    return table.maps if table else None


def test_cluster_ips_need_no_table(
    ebpf: Proxy, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    ebpf.serve(service("web", endpoints(pods[0])))
    assert request(cluster_ip(4)) == "one"
    assert installed_maps() is None
    ebpf.serve(service("web", endpoints(pods[0]), node_port=scene.NODE_PORT))
    assert installed_maps()


def test_service_that_gets_and_loses_source_ranges_is_in_one_part_at_a_time(
    ebpf: Proxy, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    balancer = cluster_ip(4, 9)
    for ranges in ([], [f"{traffic.NODE[4]}/32"], []):
        web = service("web", endpoints(pods[0]))
        web.load_balancer_ips.append(balancer)
        web.load_balancer_source_ranges.extend(ranges)
        ebpf.serve(web)
        assert request(balancer) == "one"
        with pods[1].open_socket(traffic.family(4), 1) as sock:
            sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
            rejected = pytest.raises(TimeoutError) if ranges else contextlib.nullcontext()
            with rejected:
                sock.connect((balancer, scene.SERVICE_PORT))


def test_node_without_nft_proxies_for_its_own_processes_and_reports_it(
    pods: list[labs.LabPod],
    servers: scene.Servers,
    shared_pins: pins.Pins,
    own_cgroup: cgroups.Cgroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def open_without_nft() -> CombinedBackend:
        with monkeypatch.context() as context:
            context.setenv("PATH", "/nonexistent")
            return await conftest.open_combined(shared_pins, own_cgroup)

    with structlog.testing.capture_logs() as logs:
        backend = asyncio.run(open_without_nft())
    (event,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert event["error"] == "there is no nft command"
    proxy = Proxy(backend)
    try:
        proxy.serve(
            service("web", endpoints(pods[0]), node_port=scene.NODE_PORT),
            service("core", endpoints(pods[0]), number=1, protocol=pb.PROTOCOL_SCTP),
        )
        assert request(cluster_ip(4)) == request(traffic.NODE[4], scene.NODE_PORT) == "one"
        assert installed_maps() is None
    finally:
        service_links.detach(shared_pins)
        asyncio.run(backend.close())
