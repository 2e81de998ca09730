"""Health check node ports, by HTTP."""

import asyncio
import http.client
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable

import pytest
import structlog.testing

from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.services.proxy.health import ProxyHealth
from agent.services.proxy.health_checks import HealthChecks

PORT = 32000
HOSTS = {4: "127.0.0.1", 6: "::1"}

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("isolated")]


def endpoint(address: str, *, is_terminating: bool = False) -> pb.Endpoint:
    return pb.Endpoint(
        address=address, port=80, is_local=True, is_external=True, is_terminating=is_terminating
    )


def service(name: str, *endpoints: pb.Endpoint, port: int = PORT) -> pb.ServiceEndpoints:
    """Of both families, with two ports."""
    return pb.ServiceEndpoints(
        namespace="shop",
        name=name,
        cluster_ips=["198.18.96.1", "fd00:18:96::1"],
        health_check_node_port=port,
        ports=[pb.ServicePort(port=port, endpoints=endpoints) for port in (80, 443)],
    )


class Reply:
    def __init__(self, version: int, port: int = PORT, path: str = "/") -> None:
        connection = http.client.HTTPConnection(HOSTS[version], port, timeout=30)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            self.status = response.status
            self.headers = response.headers
            self.body = response.read().decode()
        finally:
            connection.close()


def is_open(version: int, port: int = PORT) -> bool:
    with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as sock:
        return sock.connect_ex((HOSTS[version], port)) == 0


def run(
    steps: Callable[[HealthChecks], Awaitable[None]], health: ProxyHealth | None = None
) -> None:
    async def all_steps() -> None:
        checks = HealthChecks(health or ProxyHealth())
        try:
            await steps(checks)
        finally:
            await checks.close()

    asyncio.run(all_steps())


async def get(version: int, port: int = PORT, path: str = "/") -> Reply:
    return await asyncio.to_thread(Reply, version, port, path)


def test_response_is_kube_proxy_s() -> None:
    """Field by field and byte by byte what kube-proxy 1.36.2 sent."""

    async def steps(checks: HealthChecks) -> None:
        web = service("web", endpoint("198.18.1.1"), endpoint("198.18.1.2"))
        assert await checks.update([web], None)
        reply = await get(4, path="/anything")
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "application/json"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["X-Load-Balancing-Endpoint-Weight"] == "2"
        assert reply.body == (
            '{\n\t"service": {\n\t\t"namespace": "shop",\n\t\t"name": "web"\n\t},\n'
            '\t"localEndpoints": 2,\n\t"serviceProxyHealthy": true\n}'
        )

    run(steps)


def test_each_family_counts_its_own_endpoints() -> None:
    async def steps(checks: HealthChecks) -> None:
        await checks.update([service("web", endpoint("198.18.1.1"))], None)
        assert [(await get(version)).status for version in (4, 6)] == [200, 503]

    run(steps)


def test_only_ready_endpoints_of_this_node_count() -> None:
    async def steps(checks: HealthChecks) -> None:
        elsewhere = pb.Endpoint(address="198.18.1.3", port=80, is_external=True)
        leaving = endpoint("198.18.1.1", is_terminating=True)
        await checks.update([service("web", leaving, elsewhere)], None)
        reply = await get(4)
        assert (reply.status, json.loads(reply.body)["localEndpoints"]) == (503, 0)
        assert reply.headers["X-Load-Balancing-Endpoint-Weight"] == "0"

    run(steps)


def test_proxy_that_is_late_is_not_healthy_for_any_service() -> None:
    clock = iter([0.0, 0.0, *[100.0] * 9])
    health = ProxyHealth(lambda: next(clock))
    health.queued()

    async def steps(checks: HealthChecks) -> None:
        await checks.update([service("web", endpoint("198.18.1.1"))], None)
        reply = await get(4)
        assert (reply.status, json.loads(reply.body)["serviceProxyHealthy"]) == (503, False)

    run(steps, health)


def test_ports_follow_the_services() -> None:
    async def steps(checks: HealthChecks) -> None:
        await checks.update([service("web", endpoint("198.18.1.1"))], None)
        await checks.update([service("web", port=PORT + 1), service("shop", port=0)], None)
        assert [is_open(4, port) for port in (PORT, PORT + 1)] == [False, True]
        assert (await get(4, PORT + 1)).status == 503
        # Another service gets the port.
        await checks.update([service("shop", endpoint("198.18.1.1"), port=PORT + 1)], None)
        assert json.loads((await get(4, PORT + 1)).body)["service"]["name"] == "shop"

    run(steps)


def test_ports_are_at_the_selected_addresses_only() -> None:
    async def steps(checks: HealthChecks) -> None:
        await checks.update(
            [service("web", endpoint("198.18.1.1"))], [ipaddress.ip_address(HOSTS[6])]
        )
        assert [is_open(version) for version in (4, 6)] == [False, True]

    run(steps)


def test_port_of_another_process_is_reported_once_and_served_later() -> None:
    async def steps(checks: HealthChecks) -> None:
        web = service("web", endpoint("198.18.1.1"))
        with socket.socket() as other, structlog.testing.capture_logs() as logs:
            other.bind(("0.0.0.0", PORT))
            other.listen()
            assert not await checks.update([web], None)
            assert not await checks.update([web], None)
        (entry,) = logs
        assert (entry["service"], entry["address"], entry["port"]) == ("web", "0.0.0.0", PORT)
        assert await checks.update([web], None)
        assert (await get(4)).status == 200

    run(steps)
