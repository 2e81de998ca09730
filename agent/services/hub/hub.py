"""`podgate hub`: reads services once, and serves them to the agents of many nodes.

Replicas are independent of each other: each reads its source, and agents use any of them.
"""

import asyncio
import contextlib
import pathlib
import signal
from collections.abc import AsyncIterator

import msgspec
import prometheus_client
import structlog

from agent import VERSION, state_files, tasks
from agent.admin import endpoints as http_endpoints
from agent.kube.client import ApiClient
from agent.kube.objects import MetadataOnly
from agent.kube.watcher import Watcher
from agent.logs import Event, LogFormat
from agent.services.api import assembly, node_zones
from agent.services.api.metrics import ServiceCollector
from agent.services.api.node_zones import FixedZone, NodeZones, WatchedZones
from agent.serving import descriptors, http
from agent.serving.places import Limits
from agent.serving.ports import Port
from agent.settings import RUN_DIRECTORY, ServiceSettings

log = structlog.get_logger(__name__)


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one hub, set by the command line and never changed afterwards."""

    services: ServiceSettings
    """Where services come from, and where other nodes are served."""

    kubeconfig: str | None = None
    """kubeconfig file. None: KUBECONFIG, or the pod's service account."""

    http_host: str = ""
    """Address of /metrics, /healthz and /readyz. Empty: all, since the kubelet's probes come from
    the node."""

    http_port: int = 9654
    """Beside those of agent and controller."""

    run_directory: pathlib.Path = RUN_DIRECTORY
    """Socket for `podgate services`, and the saved state."""

    log_format: LogFormat = LogFormat.JSON
    """JSON, which log collectors read."""


async def run(settings: HubSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises `NoClusterConfigError` or `ListenError`."""
    descriptors.raise_limit()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with contextlib.AsyncExitStack() as undo:
        api: ApiClient | None = None
        if settings.services.source is None:
            api = await ApiClient.open(settings.kubeconfig)
            undo.push_async_callback(api.aclose)
        hub = Hub(settings, api)
        port = await undo.enter_async_context(_http(hub, settings))
        log.info(Event.HUB_STARTED, version=VERSION, http_port=port)
        async with asyncio.TaskGroup() as group:
            running = [
                tasks.start(group, "service endpoints", hub.endpoints.run),
                tasks.start(group, "state files", state_files.run),
            ]
            if hub.nodes:
                running.append(tasks.start(group, "watch of all nodes", hub.nodes.run))
            await stopping.wait()
            for task in running:
                task.cancel()
    log.info(Event.HUB_STOPPED)


class Hub:
    """One replica."""

    def __init__(self, settings: HubSettings, api: ApiClient | None) -> None:
        """api: None if services come from elsewhere; zones of nodes are unknown then."""
        self.nodes: Watcher[MetadataOnly] | None = node_zones.watch_all(api) if api else None
        zones: NodeZones = WatchedZones(self.nodes) if self.nodes else FixedZone("", "")
        self.endpoints = assembly.endpoints(
            settings.services,
            node="",
            run_directory=settings.run_directory,
            api=api,
            zones=zones,
        )
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(ServiceCollector(self.endpoints))
        prometheus_client.ProcessCollector(registry=self._registry)

    def unhealthy_reason(self) -> str | None:
        """That this responds is the proof: everything is on one event loop."""
        return None

    def unready_reason(self) -> str | None:
        """Why it cannot serve nodes. A saved state can be served."""
        if not self.endpoints.publisher.is_ready.is_set():
            return f"{self.endpoints.source.name} has not sent all services yet"
        server = self.endpoints.nodes_server
        if server is None or not server.is_serving:
            return "the port for other nodes is not open; see the log"
        return None

    async def metrics(self) -> bytes:
        content: bytes = prometheus_client.generate_latest(self._registry)
        return content


@contextlib.asynccontextmanager
async def _http(hub: Hub, settings: HubSettings) -> AsyncIterator[int]:
    """Serve HTTP while inside; yields the port. Raises `ListenError`."""
    port = Port((settings.http_host, settings.http_port), "--http-address")
    await port.open()
    with contextlib.closing(port):
        async with http.serve(http_endpoints.application(hub), port.sockets, Limits()):
            yield int(port.sockets[0].getsockname()[1])
