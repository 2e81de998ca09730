"""The eBPF proxy's two parts: which of them has what, and a node without nft."""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Iterator

import pytest
import structlog.testing
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket

from agent.lab import lab as labs
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.services.proxy import conntrack, nftables
from agent.services.proxy.combined import CombinedBackend
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


@contextlib.contextmanager
def opened(installation: pins.Pins, cgroup: cgroups.Cgroup) -> Iterator[Proxy]:
    """A proxy that starts in this block."""
    backend = asyncio.run(conftest.open_combined(installation, cgroup))
    try:
        yield Proxy(backend)
    finally:
        asyncio.run(nftables.remove())
        service_links.detach(installation)
        asyncio.run(backend.close())


@pytest.fixture
def untracked(lab: labs.Lab) -> None:
    """The node tracks no connection."""
    with NFCTSocket() as netlink:
        netlink.flush()
    assert not conntrack.is_tracking()


@pytest.fixture
def tracked(lab: labs.Lab) -> Iterator[None]:
    """A firewall that is not podgate's has the kernel track connections."""
    chains = "".join(
        f"chain {hook} {{ type filter hook {hook} priority 0; ct state new counter; }}\n"
        for hook in ("output", "forward")
    )
    script = f"table inet firewall {{\n{chains}}}\n"
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    yield
    subprocess.run(["nft", "delete", "table", "inet", "firewall"], check=True)


@pytest.mark.usefixtures("untracked", "servers")
def test_cluster_ips_need_no_table_on_a_node_that_tracks_no_connection(
    pods: list[labs.LabPod], fresh_pins: pins.Pins, own_cgroup: cgroups.Cgroup
) -> None:
    with scene.routed(), opened(fresh_pins, own_cgroup) as ebpf:
        ebpf.serve(service("web", endpoints(pods[0])))
        assert request(cluster_ip(4)) == "one"
        assert installed_maps() is None
        ebpf.serve(service("web", endpoints(pods[0]), node_port=scene.NODE_PORT))
        assert installed_maps()


@pytest.mark.usefixtures("tracked", "servers")
@pytest.mark.parametrize("version", [4, 6])
def test_port_of_a_connection_that_another_proxy_translated_can_be_used_again(
    pods: list[labs.LabPod], fresh_pins: pins.Pins, own_cgroup: cgroups.Cgroup, version: int
) -> None:
    """The kernel tracks the other one for two minutes after its end."""
    web = service("web", endpoints(pods[0]))

    def responder() -> str:
        sock = pods[1].open_socket(traffic.family(version), socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 40123))
        return scene.responder_of(sock, cluster_ip(version), scene.SERVICE_PORT)

    with scene.routed():
        other = Proxy(nftables.NftBackend())
        other.serve(web)
        assert responder() == "one"
        asyncio.run(nftables.remove())
        with opened(fresh_pins, own_cgroup) as ebpf:
            ebpf.serve(web)
            assert responder() == "one"
            # The table stays when services change.
            ebpf.serve(web, service("shop", endpoints(pods[1]), number=1))
            ebpf.serve(web)
            assert responder() == "one"


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
    fresh_pins: pins.Pins,
    own_cgroup: cgroups.Cgroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def open_without_nft() -> CombinedBackend:
        with monkeypatch.context() as context:
            context.setenv("PATH", "/nonexistent")
            return await conftest.open_combined(fresh_pins, own_cgroup)

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
        service_links.detach(fresh_pins)
        asyncio.run(backend.close())
