"""The agent's servers: HTTP for the node, metrics for clients with RBAC, and PodInfo."""

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType

import structlog

from agent import VERSION
from agent.api.podinfo.disabled import DisabledPodInfo
from agent.api.podinfo.service import PodInfoService
from agent.app.listeners import Listeners
from agent.app.reports import Reports
from agent.kube.client import ApiClient
from agent.logs import Event
from agent.settings import Settings
from bpf.attachment import Attachment

log = structlog.get_logger(__name__)


class Servers:
    """All of them, on sockets that the caller opened and closes."""

    def __init__(
        self,
        settings: Settings,
        listeners: Listeners,
        *,
        reports: Reports,
        pod_info: PodInfoService | DisabledPodInfo,
        api: ApiClient | None,
        attachment: Attachment,
    ) -> None:
        """attachment: of the gates, for the log."""
        self._settings = settings
        self._listeners = listeners
        self._reports = reports
        self._pod_info = pod_info
        self._api = api
        self._attachment = attachment

    def tasks(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """What runs as long as the agent does, by name."""
        yield "http", self._serve
        if self._listeners.metrics:
            yield "metrics", self._serve_metrics
        yield "podinfo", self._pod_info.run

    async def _serve(self) -> None:
        """Its server's modules take 0.1 s, which probes and relays do without."""
        http_server = await asyncio.to_thread(_import_http_server)
        # What is allocated by now stays; a full collection of it would block the loop for 20 ms.
        gc.collect()
        gc.freeze()
        async with http_server.serve(self._reports, self._listeners):
            log.info(
                Event.AGENT_STARTED,
                version=VERSION,
                pid=os.getpid(),
                http=self._reports.http_address,
                attachment=self._attachment.value,
            )
            await asyncio.Event().wait()

    async def _serve_metrics(self) -> None:
        remote_metrics = await asyncio.to_thread(_import_remote_metrics)
        assert self._api is not None  # `podgate run` requires it
        sockets, certificate = self._listeners.metrics, self._settings.metrics_certificate
        page = remote_metrics.StatusPage(self._reports)
        await remote_metrics.RemoteMetrics(
            self._reports, self._api, sockets, certificate, page=page
        ).run()


def _import_http_server() -> ModuleType:
    from agent.app import http_server

    return http_server


def _import_remote_metrics() -> ModuleType:
    from agent.app import remote_metrics

    return remote_metrics
