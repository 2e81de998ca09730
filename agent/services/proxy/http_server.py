"""The proxy over HTTP: /metrics, and /healthz and /livez as kube-proxy has them."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import prometheus_client
import structlog
from aiohttp import web

from agent.logs import Event
from agent.services.proxy.health import ProxyHealth
from agent.services.proxy.metrics import ProxyMetrics

log = structlog.get_logger(__name__)

# kube-proxy's (cmd/kube-proxy/app/server.go): another proxy may have the port until it exits.
_RETRY_SECONDS = 5.0
_SHUTDOWN_SECONDS = 1.0
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
    await _serve(place, app)


async def serve_health(place: Place, health: ProxyHealth, metrics: ProxyMetrics) -> None:
    """Serve until cancelled."""
    app = web.Application()
    app.router.add_get("/healthz", _health(health, metrics.healthz_responses))
    app.router.add_get("/livez", _health(health, metrics.livez_responses))
    await _serve(place, app)


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


async def _serve(place: Place, app: web.Application) -> None:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    is_failing = False
    try:
        while True:
            try:
                await web.TCPSite(runner, *place, reuse_address=True).start()
                break
            except OSError as error:
                if not is_failing:
                    log.warning(
                        Event.PROXY_HTTP_NOT_SERVED,
                        address=f"{place[0]}:{place[1]}",
                        error=error.strerror or str(error),
                    )
                is_failing = True
                await asyncio.sleep(_RETRY_SECONDS)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
