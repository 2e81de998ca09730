"""`podgate controller`: a replica that leads, or waits to lead."""

import asyncio
import contextlib
import signal

import prometheus_client
import structlog

from agent import VERSION, tasks
from agent.controller import components, http_server, metrics
from agent.controller.leader_client import LeaderClient
from agent.controller.lease import Lease
from agent.controller.settings import ControllerSettings
from agent.controller.webhook_server import WebhookServer
from agent.errors import PodgateError
from agent.kube.client import ApiClient
from agent.logs import Event
from agent.serving import descriptors

log = structlog.get_logger(__name__)

LEASE_NAME = "podgate-controller"

# A component that does not end when it is cancelled would write beside the next leader.
_STOP_SECONDS = 3.0
# client-go's HealthzAdaptor in kube-controller-manager.
_OVERDUE_SECONDS = 20.0


class ControllerError(PodgateError):
    """The controller cannot start, or cannot end its work."""


async def run(settings: ControllerSettings) -> None:
    """Run one replica until SIGTERM or SIGINT.

    Raises `NoClusterConfigError` or `ControllerError`.
    """
    descriptors.raise_limit()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with contextlib.AsyncExitStack() as undo:
        # Renewals have a client of their own, so that nothing delays them.
        lease_client = await ApiClient.open(settings.kubeconfig)
        undo.push_async_callback(lease_client.aclose)
        lease = Lease(
            lease_client, namespace=settings.namespace, name=LEASE_NAME, identity=settings.identity
        )
        webhook = WebhookServer(settings.webhook)
        controller = Controller(settings, lease, webhook)
        await undo.enter_async_context(http_server.serve(controller, settings))
        log.info(Event.CONTROLLER_STARTED, version=VERSION, identity=settings.identity)
        async with asyncio.TaskGroup() as group:
            running = [
                tasks.start(group, "leadership", controller.lead),
                tasks.start(group, "webhook", webhook.run),
            ]
            await stopping.wait()
            for task in running:
                task.cancel()
        await lease.release()
    log.info(Event.CONTROLLER_STOPPED)


class Controller:
    """One replica."""

    def __init__(self, settings: ControllerSettings, lease: Lease, webhook: WebhookServer) -> None:
        self._settings = settings
        self._webhook = webhook
        self._lease = lease
        self.is_leading = False
        self._registry = metrics.new_registry(lambda: self.is_leading, webhook.is_certificate_valid)

    def unhealthy_reason(self) -> str | None:
        """Why this process is to be restarted: it leads without the Lease."""
        if self.is_leading and self._lease.overdue_seconds() > _OVERDUE_SECONDS:
            return "leading without the Lease"
        return None

    async def metrics(self) -> bytes:
        content: bytes = prometheus_client.generate_latest(self._registry)
        return content

    def unready_reason(self) -> str | None:
        """Why this replica serves no requests. Waiting for the Lease is none."""
        return self._webhook.unready_reason()

    async def lead(self) -> None:
        """Acquire the Lease, run all components while it is held, and again."""
        while True:
            await self._lease.acquire()
            log.info(Event.LEADERSHIP_ACQUIRED, identity=self._lease.identity)
            api = await LeaderClient.open(self._settings.kubeconfig)
            api.lease = self._lease
            try:
                await self._run_components(api)
            finally:
                self.is_leading = False
                await api.aclose()
            log.warning(Event.LEADERSHIP_LOST, holder=self._lease.holder)

    async def _run_components(self, api: LeaderClient) -> None:
        """Run them until the Lease is lost."""
        async with asyncio.TaskGroup() as group:
            running = [tasks.start(group, name, run) for name, run in components.components(api)]
            self.is_leading = True
            try:
                await self._lease.hold()
            finally:
                for task in running:
                    task.cancel()
                if running:
                    _, pending = await asyncio.wait(running, timeout=_STOP_SECONDS)
                    if pending:
                        names = ", ".join(sorted(task.get_name() for task in pending))
                        raise ControllerError(f"components do not end: {names}")
