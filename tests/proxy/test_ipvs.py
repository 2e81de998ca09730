"""IPVS: open connections, other programs' services, and other processes of the proxy."""

import asyncio
import contextlib
import ipaddress
import socket
import subprocess
from collections.abc import Iterator

import pytest
from pyroute2.ipvs import IPVS, IPVSService

from agent.lab import lab as labs
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.services.linux import ipvs as kernel
from agent.services.proxy import ipvs, ipvs_rules
from agent.services.proxy.backend import BackendError
from bpf.services.tables import ServiceAddress
from tests.kernel import traffic
from tests.proxy import scene
from tests.proxy.conftest import Proxy
from tests.proxy.scene import cluster_ip, endpoints, request, service

BOTH = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture
def table(ipvs_table: Proxy) -> Iterator[kernel.IpvsTable]:
    """What the kernel has."""
    with contextlib.closing(kernel.IpvsTable()) as opened:
        yield opened


@pytest.mark.kernel
@BOTH
def test_open_connection_outlives_its_endpoint(
    ipvs_table: Proxy, table: kernel.IpvsTable, pods: list[labs.LabPod], version: int
) -> None:
    address = cluster_ip(version), scene.SERVICE_PORT
    with pods[0].listen(scene.PORT) as first, pods[1].listen(scene.PORT) as second:
        for listener in (first, second):
            listener.settimeout(traffic.LIMIT_SECONDS)
        ipvs_table.serve(service("web", endpoints(pods[0])))
        with socket.create_connection(address, traffic.LIMIT_SECONDS) as client:
            server, _ = first.accept()
            with server:
                server.settimeout(traffic.LIMIT_SECONDS)
                ipvs_table.serve(service("web", endpoints(pods[1])))
                with socket.create_connection(address, traffic.LIMIT_SECONDS):
                    second.accept()[0].close()
                # A further change, while it is open.
                ipvs_table.serve(
                    service("web", endpoints(pods[1])), service("x", endpoints(pods[1]), number=1)
                )
                client.sendall(b"still")
                assert server.recv(10) == b"still"
                server.sendall(b"here")
                assert client.recv(10) == b"here"
    assert sorted(weights(table, version, socket.IPPROTO_TCP)) == [0, 1]


@pytest.mark.kernel
@BOTH
def test_datagrams_have_no_connection_to_wait_for(
    ipvs_table: Proxy,
    table: kernel.IpvsTable,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    version: int,
) -> None:
    for pod in pods[:2]:
        ipvs_table.serve(service("dns", endpoints(pod), protocol=pb.PROTOCOL_UDP))
        assert request(cluster_ip(version), kind=socket.SOCK_DGRAM) == pod.name
        assert weights(table, version, socket.IPPROTO_UDP) == [1]


def weights(table: kernel.IpvsTable, version: int, protocol: int) -> list[int]:
    own = ServiceAddress(ipaddress.ip_address(cluster_ip(version)), scene.SERVICE_PORT, protocol)
    return [state.weight for state in table.destinations(own).values()]


@pytest.mark.kernel
def test_services_of_other_programs_stay(
    ipvs_table: Proxy, table: kernel.IpvsTable, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    foreign = IPVSService(addr="198.18.127.1", port=80, protocol=socket.IPPROTO_TCP)
    with IPVS() as others:
        others.service("add", foreign)
        try:
            ipvs_table.serve(service("web", endpoints(pods[0])))
            assert request(cluster_ip(4)) == "one"
            assert len(table.services()) == 2  # one for each family
            asyncio.run(ipvs.remove())
            assert table.services() == {}
            assert len(list(others.service("dump"))) == 1
        finally:
            others.service("del", foreign)


@pytest.mark.kernel
def test_next_process_removes_what_is_no_longer_published(
    ipvs_table: Proxy, table: kernel.IpvsTable, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    kept = service("kept", endpoints(pods[0]), affinity_seconds=600)
    ipvs_table.serve(kept, service("gone", endpoints(pods[1]), number=1))
    before = table.services()
    assert set(before.values()) == {0, 600}
    following = Proxy(asyncio.run(ipvs.IpvsBackend.open()))
    following.serve(kept)
    assert table.services() == {one: seconds for one, seconds in before.items() if seconds}
    assert request(cluster_ip(4)) == "one"
    with pytest.raises(OSError):  # noqa: PT011  nothing listens: no route, or no answer
        request(cluster_ip(4, 1))


@pytest.mark.kernel
def test_flushed_ruleset_returns_with_the_next_change(
    ipvs_table: Proxy, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    web = service("web", endpoints(pods[0]))
    ipvs_table.serve(web)
    subprocess.run(["nft", "delete", "table", "inet", ipvs_rules.TABLE], check=True)
    ipvs_table.serve(web, service("other", endpoints(pods[0]), number=1))
    assert request(cluster_ip(4), client=pods[0]) == "one"


class Removed(kernel.IpvsTable):
    """A table without the service, as another program leaves it."""

    def __init__(self) -> None:
        self.readings = 0

    def destinations(
        self, service: ServiceAddress
    ) -> dict[kernel.Destination, kernel.DestinationState]:
        self.readings += 1
        return {}


def test_destinations_are_read_once_however_many_a_service_loses() -> None:
    one = ServiceAddress(ipaddress.ip_address("198.18.0.7"), 80, socket.IPPROTO_TCP)
    removed: ipvs._Entries = {
        kernel.Destination(one, ServiceAddress(one.address, port, socket.IPPROTO_TCP)): 1
        for port in range(1000, 1010)
    }
    table = Removed()
    assert ipvs._draining(table, removed, {one: 0}) == {}
    assert table.readings == 1


def test_missing_module_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_FAMILY", "NO-SUCH-FAMILY")
    with pytest.raises(BackendError) as raised:
        asyncio.run(ipvs.IpvsBackend.open())
    assert str(raised.value) == (
        "this kernel has no IPVS, or its module ip_vs is not loaded: use another --backend, "
        "such as nft"
    )
