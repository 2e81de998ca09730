"""The proxy's process: installs what the service endpoints API publishes, until it is stopped.

The installed state stays in the kernel, as kube-proxy's rules do; the next process takes it over.
"""

import asyncio
import contextlib
import dataclasses
import functools
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from agent import tasks
from agent.linux.link_monitor import LinkMonitor
from agent.linux.nft_monitor import Deleted, NftMonitor
from agent.logs import Event
from agent.services.client.services import ServicesClient, ServicesState
from agent.services.client.v1alpha1 import endpoints_pb2
from agent.services.proxy import http_server
from agent.services.proxy.backend import Backend, BackendError
from agent.services.proxy.frontends import FrontendChange, FrontendTable
from agent.services.proxy.health import ProxyHealth
from agent.services.proxy.health_checks import HealthChecks
from agent.services.proxy.metrics import ProxyMetrics
from agent.services.proxy.node_addresses import NodeAddressSelection
from agent.services.proxy.settings import ProxySettings
from agent.serving import descriptors
from bpf.abi import IPAddress

log = structlog.get_logger(__name__)

# A failed change is retried after this.
_RETRY_SECONDS = 1.0
# Another process may close the port of a health check. kube-proxy tries again with each sync,
# which is at least every 30 s.
_PORT_RETRY_SECONDS = 30.0
# iptables' legacy variant sends no messages; kube-proxy compares as often.
_REPAIR_SECONDS = 30.0
# No message is read for routes, by which the primary addresses are found.
_ROUTES_SECONDS = 30.0


@dataclasses.dataclass(slots=True)
class _ProxyState:
    """The newest input. Created and used on the event loop only."""

    services: ServicesState | None = None
    services_at: float = 0.0
    """On the event loop's clock."""
    addresses: tuple[IPAddress, ...] | None = None
    is_suspect: bool = False
    """Whether another program may have deleted what is installed."""
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def suspect(self) -> None:
        self.is_suspect = True
        self.changed.set()


async def run(backend: Backend, settings: ProxySettings) -> None:
    """Follow the API until SIGTERM or SIGINT."""
    descriptors.raise_limit()
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if settings.started_file is not None:  # a previous process'
        await asyncio.to_thread(settings.started_file.unlink, missing_ok=True)
    state, health = _ProxyState(), ProxyHealth()
    metrics = ProxyMetrics(health)
    updates = _Updates(backend, state, settings, health, metrics)
    runs: dict[str, Callable[[], Awaitable[None]]] = {
        "updates": updates.run,
        "addresses": functools.partial(_follow_addresses, state, settings.node_addresses),
        "nftables": functools.partial(_follow_rule_sets, state, backend),
    }
    if place := settings.metrics_address:
        runs["metrics"] = functools.partial(http_server.serve_metrics, place, metrics)
    if place := settings.healthz_address:
        runs["health"] = functools.partial(http_server.serve_health, place, health, metrics)
    async with asyncio.TaskGroup() as group, _follow_services(settings, state, metrics):
        started = [tasks.start(group, name, run) for name, run in runs.items()]
        await stopped.wait()
        for task in started:
            task.cancel()


@contextlib.asynccontextmanager
async def _follow_services(
    settings: ProxySettings, state: _ProxyState, metrics: ProxyMetrics
) -> AsyncIterator[None]:
    """Read services in a thread, since the client blocks until there is a new state."""
    loop = asyncio.get_running_loop()

    def set_services(services: ServicesState) -> None:
        state.services, state.services_at = services, loop.time()
        metrics.revisions.inc()
        metrics.services, metrics.queued_at = services.services, time.time()
        state.changed.set()

    def follow() -> None:
        for services in client:
            loop.call_soon_threadsafe(set_services, services)

    def warn(problem: str) -> None:
        log.warning(Event.SERVICES_STREAM_INTERRUPTED, problem=problem)

    selection = endpoints_pb2.NextFilter(service_proxy_name=settings.service_proxy_name)
    client = ServicesClient(settings.target, filter=selection, on_problem=warn)
    thread = threading.Thread(target=follow, name="localnet", daemon=True)
    thread.start()
    try:
        yield
    finally:
        client.cancel()
        await asyncio.to_thread(thread.join)
        client.close()


async def _follow_addresses(state: _ProxyState, selection: NodeAddressSelection) -> None:
    changed = asyncio.Event()
    monitor = LinkMonitor(
        on_link_changed=changed.set, on_address_changed=lambda nsid: None, on_overrun=changed.set
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(monitor.run(), name="links")
        while True:
            changed.clear()
            addresses = await asyncio.to_thread(selection.read)
            if addresses != state.addresses:
                state.addresses = addresses
                state.changed.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ROUTES_SECONDS if selection.is_primary else None):
                    await changed.wait()


async def _follow_rule_sets(state: _ProxyState, backend: Backend) -> None:
    """Have what is installed compared with the kernel when some of it may have been deleted."""

    def on_deleted(deleted: Deleted | None) -> None:
        if deleted is None or backend.is_concerned(deleted):
            state.suspect()

    async with asyncio.TaskGroup() as group:
        group.create_task(NftMonitor(on_deleted).run(), name="messages")
        while backend.is_polled:
            await asyncio.sleep(_REPAIR_SECONDS)
            state.suspect()


class _Updates:
    """Writes the newest input to the kernel, and then to the health check ports."""

    def __init__(
        self,
        backend: Backend,
        state: _ProxyState,
        settings: ProxySettings,
        health: ProxyHealth,
        metrics: ProxyMetrics,
    ) -> None:
        self._backend = backend
        self._state = state
        self._settings = settings
        self._health = health
        self._metrics = metrics
        self._table = FrontendTable()
        self._pending = FrontendChange({}, set())
        self._is_applied = self._is_failing = False

    async def run(self) -> None:
        checks = HealthChecks(self._health)
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._state.changed.wait()
                self._state.changed.clear()
                services, addresses = self._state.services, self._state.addresses
                if services is None or addresses is None:
                    continue
                arrived = self._state.services_at
                self._health.queued()
                if not await self._apply(services, addresses):
                    loop.call_later(_RETRY_SECONDS, self._state.changed.set)
                    continue
                if self._state.is_suspect and not await self._repair():
                    loop.call_later(_RETRY_SECONDS, self._state.changed.set)
                    continue
                self._health.updated()
                if self._metrics.revision != services.rev:
                    self._metrics.revision = services.rev
                    self._metrics.programming_seconds.observe(loop.time() - arrived)
                selection = self._settings.node_addresses
                bound = None if selection.is_all else addresses
                if not await checks.update(services.services, bound):
                    loop.call_later(_PORT_RETRY_SECONDS, self._state.changed.set)
        finally:
            await checks.close()

    async def _repair(self) -> bool:
        """Whether what is installed is in the kernel. Until then the proxy is late, as with a
        state that cannot be applied."""
        self._state.is_suspect = False
        try:
            if await self._backend.repair():
                self._metrics.repairs.inc()
                log.warning(Event.SERVICES_RESTORED)
        except BackendError as error:
            self._state.is_suspect = True
            self._metrics.sync_failures.inc()
            if not self._is_failing:
                log.error(Event.SERVICES_NOT_APPLIED, error=str(error))
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    async def _apply(self, services: ServicesState, addresses: tuple[IPAddress, ...]) -> bool:
        """Whether the kernel has this state."""
        change = await asyncio.to_thread(self._table.update, services.services, addresses)
        self._metrics.service_changes.inc(self._table.changed_services)
        self._pending = self._pending.then(change)
        if self._is_applied and not (self._pending.changed or self._pending.removed):
            return True
        try:
            with self._metrics.sync_seconds.time():
                await self._backend.apply(self._pending)
        except BackendError as error:
            self._metrics.sync_failures.inc()
            if not self._is_failing:
                log.error(Event.SERVICES_NOT_APPLIED, error=str(error))
            self._is_failing = True
            return False
        for kind, addressed in (
            ("changed", self._pending.changed),
            ("removed", self._pending.removed),
        ):
            self._metrics.frontend_changes.labels(kind).inc(len(addressed))
        if not self._is_applied:
            log.info(Event.SERVICES_APPLIED, count=len(services.services), rev=services.rev)
            if self._settings.started_file is not None:
                await asyncio.to_thread(self._settings.started_file.touch)
        self._is_applied, self._is_failing = True, False
        self._pending = FrontendChange({}, set())
        return True
