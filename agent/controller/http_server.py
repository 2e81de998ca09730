"""The controller over HTTP: health for the kubelet, metrics."""

import contextlib
from collections.abc import AsyncIterator

from agent.admin import endpoints
from agent.admin.endpoints import Observable
from agent.controller.settings import ControllerSettings
from agent.serving import http
from agent.serving.places import Limits
from agent.serving.ports import Port


@contextlib.asynccontextmanager
async def serve(replica: Observable, settings: ControllerSettings) -> AsyncIterator[None]:
    """Serve /healthz, /readyz and /metrics, which contain no names. Raises `ListenError`."""
    port = Port((settings.http_host, settings.http_port), "--http-address")
    await port.open()
    with contextlib.closing(port):
        async with http.serve(endpoints.application(replica), port.sockets, Limits()):
            yield
