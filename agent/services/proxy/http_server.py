"""The proxy over HTTP: /metrics, and /healthz and /livez as kube-proxy has them."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import prometheus_client

from agent.http_library import web
from agent.logs import Event
from agent.services.proxy.health import ProxyHealth
from agent.services.proxy.metrics import ProxyMetrics
from agent.serving import http
from agent.serving.places import Limits
from agent.serving.ports import Port

_EXPOSITION = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}

Place = tuple[str, int]
"""Address and port."""


async def serve_metrics(place: Place, metrics: ProxyMetrics) -> None:
    """Serve until cancelled."""

    async def respond(request: web.Request) -> web.Response:
        body = await asyncio.to_thread(metrics.exposition)
        return web.Response(body=body, headers=_EXPOSITION)

    app = web.Application()
    app.router.add_get("/metrics", respond)
    await _serve(place, "--metrics-address", app, Limits())


async def serve_health(place: Place, health: ProxyHealth, metrics: ProxyMetrics) -> None:
    """Serve until cancelled."""
    app = web.Application()
    app.router.add_get("/healthz", _health(health, metrics.healthz_responses))
    app.router.add_get("/livez", _health(health, metrics.livez_responses))
    await _serve(place, "--healthz-address", app, Limits(is_kept=True))


def _health(
    health: ProxyHealth, responses: prometheus_client.Counter
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def respond(request: web.Request) -> web.Response:
        report = health.report()
        status = 200 if report["healthy"] else 503
        responses.labels(str(status)).inc()
        return web.Response(
            status=status,
            body=json.dumps(report, separators=(",", ":")).encode(),
            headers={"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"},
        )

    return respond


async def _serve(place: Place, option: str, app: web.Application, limits: Limits) -> None:
    """As kube-proxy's, the port is tried again: another proxy may have it until it exits."""
    port = Port(place, option)
    with contextlib.closing(port):
        await port.open_always(Event.PROXY_HTTP_NOT_SERVED)
        async with http.serve(app, port.sockets, limits):
            await asyncio.Event().wait()
