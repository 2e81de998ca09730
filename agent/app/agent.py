"""One agent: its gates first, then what it does for the pods behind them."""

import asyncio
import contextlib
import functools
import gc
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import structlog

from agent import tasks
from agent.app import watchdog
from agent.app.gating import Gating
from agent.app.handover import Handover, Turn
from agent.app.readiness import Readiness
from agent.app.rings import Rings
from agent.gates.worker import GateWorker
from agent.kube.client import ApiClient
from agent.logs import Event
from agent.settings import Settings

if TYPE_CHECKING:
    from agent.app.pod_services import PodServices

log = structlog.get_logger(__name__)

# While a source of pods is not available, probes, relays and servers start after this time.
_FIRST_GATES_SECONDS = 1.0


class Agent:
    """One agent, for one turn on the node. To be created on the loop."""

    def __init__(
        self,
        settings: Settings,
        gate_worker: GateWorker,
        api: ApiClient | None,
        handover: Handover,
        turn: Turn,
    ) -> None:
        """api: for a node of a cluster."""
        self._settings = settings
        self._api = api
        self._handover = handover
        self._gating = Gating(settings, gate_worker, api, self._on_kubelet)
        self._rings = Rings(on_restart=self._gating.mark_everything)
        self._pod_services: PodServices | None = None
        self._readiness = Readiness(
            settings.pod_directory, self._unready_reason, is_take_over=turn.is_take_over
        )

    async def run(self) -> bool:
        """Serve until SIGTERM or SIGINT, or until another agent takes over: whether one does.

        Gates are pinned, so they stay in force. Raises `TakeOverError`.
        """
        self._handover.handle_signals()
        with contextlib.closing(self._rings):
            await self._gating.open()
            async with asyncio.TaskGroup() as group:
                running = [self._start(group, name, run) for name, run in self._tasks()]
                await self._handover.wait_for_end(self._readiness.overdue)
                for task in running:
                    task.cancel()
        self._readiness.check_take_over()
        # The next turn's objects replace these.
        gc.unfreeze()
        handover = self._handover
        has_handed_over = handover.requested.is_set() and not handover.stopping.is_set()
        gates = sum(len(state.gates) for state in self._gating.store.states())
        log.info(Event.HANDED_OVER if has_handed_over else Event.AGENT_STOPPED, gates=gates)
        return has_handed_over

    def _start(
        self, group: asyncio.TaskGroup, name: str, run: Callable[[], Awaitable[None]]
    ) -> asyncio.Task[None]:
        with tasks.supervised(self._rings.supervisor(name)):
            return tasks.start(group, name, run)

    def _tasks(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """All that runs as long as the agent does, by name."""
        limit = self._settings.watchdog_seconds
        yield "watchdog", functools.partial(watchdog.run, limit, self._gating.unhealthy_reason)
        yield "readiness", self._readiness.run
        yield from self._gating.tasks()
        yield "pod-services", self._run_pod_services

    async def _run_pod_services(self) -> None:
        """Their modules, and their work, would delay the first gates."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_GATES_SECONDS):
                await self._gating.store.synced.wait()
        pod_services = await asyncio.to_thread(_import_pod_services, self._settings)
        self._pod_services = pod_services.PodServices(
            self._settings,
            self._gating,
            self._api,
            self._handover,
            self._rings,
            unready_reason=self._readiness.reason,
        )
        await self._pod_services.run()

    def _unready_reason(self) -> str | None:
        reason = self._gating.unready_reason()
        if reason is None and self._pod_services is None:
            return "probes, relays and servers are not started yet"
        return reason

    def _on_kubelet(self) -> None:
        if self._pod_services:
            self._pod_services.on_kubelet()


def _import_pod_services(settings: Settings) -> ModuleType:
    from agent.app import pod_services

    pod_services.import_optional(settings)
    return pod_services
