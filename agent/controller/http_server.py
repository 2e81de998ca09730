"""The controller over HTTP: health for the kubelet, metrics."""

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import prometheus_client
from aiohttp import web

from agent.controller.settings import ControllerSettings
from agent.errors import PodgateError

_SHUTDOWN_SECONDS = 1.0


class ListenError(PodgateError):
    """An address that cannot be listened on."""


class Replica(Protocol):
    """What is served of a replica."""

    registry: prometheus_client.CollectorRegistry

    def unhealthy_reason(self) -> str | None: ...

    def unready_reason(self) -> str | None: ...


@contextlib.asynccontextmanager
async def serve(replica: Replica, settings: ControllerSettings) -> AsyncIterator[None]:
    """Serve /healthz, /readyz and /metrics. Raises `ListenError`."""
    app = web.Application()
    app.router.add_get("/healthz", _health(replica.unhealthy_reason))
    app.router.add_get("/readyz", _health(replica.unready_reason))
    app.router.add_get("/metrics", _metrics(replica.registry))
    async with started(app, settings.http_host, settings.http_port):
        yield


@contextlib.asynccontextmanager
async def started(
    app: web.Application, host: str, port: int, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve an application. host: empty for all addresses. Raises `ListenError`."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host or None, port, ssl_context=tls).start()
        except OSError as error:
            raise ListenError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another address with "
                "--http-address or --webhook-address"
            ) from error
        yield
    finally:
        await runner.cleanup()


def _health(
    find_problem: Callable[[], str | None],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        reason = find_problem()
        return web.Response(status=503 if reason else 200, text=f"{reason or 'ok'}\n")

    return handle


def _metrics(
    registry: prometheus_client.CollectorRegistry,
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=prometheus_client.generate_latest(registry), headers=headers)

    return handle
