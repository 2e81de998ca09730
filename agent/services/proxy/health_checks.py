"""Health check node ports: a load balancer's checks whether this node has endpoints of a service.

Only services with a load balancer and externalTrafficPolicy Local have such a port. The responses
are kube-proxy's (pkg/proxy/healthcheck/service_health.go).
"""

import contextlib
import dataclasses
import ipaddress
import json
import socket
from collections.abc import Callable, Iterable, Sequence

import structlog

from agent.http_library import web
from agent.logs import Event
from agent.services.client.v1alpha1 import endpoints_pb2
from agent.services.proxy.health import ProxyHealth
from agent.serving import http
from agent.serving.places import Limits
from bpf.abi import IPAddress

log = structlog.get_logger(__name__)

# Health checks are connections of their own, or come every few seconds.
_LIMITS = Limits(silent_seconds=15.0, is_kept=True)
_ANY = (ipaddress.IPv4Address(0), ipaddress.IPv6Address(0))


@dataclasses.dataclass(frozen=True, slots=True)
class _Check:
    """What one port reports."""

    namespace: str
    name: str
    endpoint_count: int


_Place = tuple[IPAddress, int]
_Respond = Callable[[_Place], web.Response]


class HealthChecks:
    """HTTP servers on the health check node ports of all services."""

    def __init__(self, health: ProxyHealth) -> None:
        self._health = health
        self._checks: dict[_Place, _Check] = {}
        self._servers: dict[_Place, _Server] = {}
        self._failing: set[_Place] = set()

    async def update(
        self,
        services: Iterable[endpoints_pb2.ServiceEndpoints],
        node_addresses: Sequence[IPAddress] | None,
    ) -> bool:
        """Serve these services; returns False if a port cannot be served, which the caller retries.

        node_addresses: the addresses of the ports; None: all, also later ones.
        """
        addresses = _ANY if node_addresses is None else node_addresses
        self._checks = {
            (address, service.health_check_node_port): _check(service, address.version)
            for service in services
            if service.health_check_node_port
            for address in addresses
            if address.version in _versions(service)
        }
        for place in self._servers.keys() - self._checks.keys():
            await self._servers.pop(place).close()
        for place in self._checks.keys() - self._servers.keys():
            try:
                self._servers[place] = await _Server.start(place, self._respond)
            except OSError as error:
                self._report(place, error)
        missing = self._checks.keys() - self._servers.keys()
        self._failing &= missing
        return not missing

    async def close(self) -> None:
        """Close all ports."""
        await self.update((), ())

    def _report(self, place: _Place, error: OSError) -> None:
        if place not in self._failing:
            self._failing.add(place)
            check = self._checks[place]
            log.warning(
                Event.HEALTH_CHECK_NOT_SERVED,
                namespace=check.namespace,
                service=check.name,
                address=str(place[0]),
                port=place[1],
                error=error.strerror or str(error),
            )

    def _respond(self, place: _Place) -> web.Response:
        check = self._checks.get(place)
        if check is None:  # closed meanwhile
            return web.Response(status=503)
        is_healthy = self._health.is_healthy
        body = {
            "service": {"namespace": check.namespace, "name": check.name},
            "localEndpoints": check.endpoint_count,
            "serviceProxyHealthy": is_healthy,
        }
        return web.Response(
            status=200 if check.endpoint_count and is_healthy else 503,
            body=json.dumps(body, indent="\t").encode(),
            headers={
                "Content-Type": "application/json",
                "X-Content-Type-Options": "nosniff",
                "X-Load-Balancing-Endpoint-Weight": str(check.endpoint_count),
            },
        )


class _Server:
    """One port on one address; every path has the same response."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack

    @classmethod
    async def start(cls, place: _Place, respond: _Respond) -> "_Server":
        """Raises `OSError`."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return respond(place)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        async with contextlib.AsyncExitStack() as stack:
            bound = stack.enter_context(_bound(*place))
            bound.listen()
            await stack.enter_async_context(http.serve(app, (bound,), _LIMITS))
            return cls(stack.pop_all())
        raise AssertionError

    async def close(self) -> None:
        await self._stack.aclose()


def _bound(address: IPAddress, port: int) -> socket.socket:
    """A socket of this family only. Raises `OSError`."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.version == 6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((str(address), port))
        sock.setblocking(False)
        stack.pop_all()
        return sock


def _versions(service: endpoints_pb2.ServiceEndpoints) -> set[int]:
    return {ipaddress.ip_address(text).version for text in service.cluster_ips}


def _check(service: endpoints_pb2.ServiceEndpoints, version: int) -> _Check:
    """Ready endpoints of this node, each address once: terminating ones serve clients, but no new
    ones shall come (pkg/proxy/endpointschangetracker.go, `LocalReadyEndpoints`)."""
    addresses = {
        endpoint.address
        for port in service.ports
        for endpoint in port.endpoints
        if endpoint.is_local
        and not endpoint.is_terminating
        and ipaddress.ip_address(endpoint.address).version == version
    }
    return _Check(service.namespace, service.name, len(addresses))
