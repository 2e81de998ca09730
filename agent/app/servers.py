"""The agent's servers: HTTP for the node, metrics for clients with RBAC, and PodInfo."""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import structlog

from agent import VERSION
from agent.api import listen
from agent.api.podinfo.service import PodInfoService
from agent.app.ports import Ports
from agent.app.reports import Reports
from agent.kube.client import ApiClient
from agent.linux import malloc
from agent.logs import Event
from agent.serving.ports import ListenError
from agent.settings import Settings
from bpf import pins
from bpf.attachment import Attachment

if TYPE_CHECKING:
    from agent.api.podinfo.disabled import DisabledPodInfo

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 5.0


class Servers:
    """All of them. Gates, probes and readiness wait for none."""

    def __init__(
        self,
        settings: Settings,
        ports: Ports,
        *,
        reports: Reports,
        pod_info: "PodInfoService | DisabledPodInfo",
        api: ApiClient | None,
        attachment: Attachment,
    ) -> None:
        """ports: opened and closed by this; attachment: of the gates, for the log."""
        self._settings = settings
        self._ports = ports
        self._reports = reports
        self._pod_info = pod_info
        self._api = api
        self._attachment = attachment
        self._admin_tried = asyncio.Event()

    def tasks(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """What runs as long as the agent does, by name."""
        yield "admin", self._serve_admin
        yield "http", self._serve_http
        if self._ports.metrics:
            yield "metrics", self._serve_metrics
        yield "podinfo", self._pod_info.run

    async def _serve_admin(self) -> None:
        http_server = await asyncio.to_thread(_import_http_server)
        async with self._admin_socket() as admin, http_server.serve_admin(self._reports, admin):
            await asyncio.Event().wait()

    async def _serve_http(self) -> None:
        """Its server's modules take 0.1 s, which probes and relays do without."""
        http_server = await asyncio.to_thread(_import_http_server)
        # What is allocated by now stays; a full collection of it would block the loop for 20 ms.
        gc.collect()
        gc.freeze()
        malloc.give_back()
        await self._admin_tried.wait()
        with contextlib.closing(self._ports.http):
            with contextlib.suppress(ListenError):
                await self._ports.http.open()
            log.info(
                Event.AGENT_STARTED,
                version=VERSION,
                pid=os.getpid(),
                http=self._ports.http.address,
                attachment=self._attachment.value,
            )
            if self._ports.http.problem:
                await self._ports.http.open_always(Event.HTTP_NOT_SERVED)
            async with http_server.serve(self._reports, self._ports.http.sockets):
                await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def _admin_socket(self) -> AsyncIterator[socket.socket]:
        """Listening, in a directory that only root enters; tried until it can be made."""
        bound = None
        while bound is None:
            try:
                bound = listen.unix_socket(
                    self._settings.admin_socket, directory_mode=0o700, mode=0o600
                )
            except ListenError as error:
                if not self._admin_tried.is_set():
                    log.error(Event.ADMIN_API_NOT_SERVED, error=str(error))
                self._admin_tried.set()
                await asyncio.sleep(_RETRY_SECONDS)
        with bound:
            bound.listen()
            self._admin_tried.set()
            yield bound

    async def _serve_metrics(self) -> None:
        remote_metrics = await asyncio.to_thread(_import_remote_metrics)
        port, certificate = self._ports.metrics, self._settings.metrics_certificate
        assert self._api is not None  # `podgate run` requires it
        assert port is not None  # `tasks`
        page = remote_metrics.StatusPage(self._reports)
        reading = await asyncio.to_thread(_import_reading)
        explain = reading.pod_explainer(
            pins.Pins(self._settings.bpffs), self._settings.run_directory
        )
        answers = reading.Reading(self._reports, self._api, explain_pod=explain)
        with contextlib.closing(port):
            await port.open_always(Event.METRICS_NOT_SERVED)
            await remote_metrics.RemoteMetrics(
                self._reports, self._api, port.sockets, certificate, page=page, reading=answers
            ).run()


def _import_http_server() -> ModuleType:
    from agent.app import http_server

    return http_server


def _import_remote_metrics() -> ModuleType:
    from agent.app import remote_metrics

    return remote_metrics


def _import_reading() -> ModuleType:
    from agent.app import reading

    return reading
