"""The controller over HTTP: health for the kubelet, metrics."""

import contextlib
import ssl
from collections.abc import AsyncIterator

from aiohttp import web

from agent.admin import endpoints
from agent.admin.endpoints import Observable
from agent.controller.settings import ControllerSettings
from agent.errors import PodgateError


class ListenError(PodgateError):
    """An address that cannot be listened on."""


@contextlib.asynccontextmanager
async def serve(replica: Observable, settings: ControllerSettings) -> AsyncIterator[None]:
    """Serve /healthz, /readyz and /metrics, which contain no names. Raises `ListenError`."""
    app = endpoints.application(replica)
    async with started(app, settings.http_host, settings.http_port):
        yield


@contextlib.asynccontextmanager
async def started(
    app: web.Application, host: str, port: int, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve an application. host: empty for all addresses. Raises `ListenError`."""
    async with endpoints.runner_of(app) as runner:
        try:
            await web.TCPSite(runner, host or None, port, ssl_context=tls).start()
        except OSError as error:
            raise ListenError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another address with "
                "--http-address or --webhook-address"
            ) from error
        yield
