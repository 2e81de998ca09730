"""Attaches podgate's programs that belong to no pod, and detaches them while podgate is off.

The ceiling of the modes is the lever: with a ceiling of off the reconciler detaches all gates, the
relay is released and the default-deny table removed, as for any change of modes. Hooks, tracing
programs and programs on host devices serve all pods alike, so they go with the ceiling.
"""

import asyncio
from collections.abc import Callable

import structlog

from agent.gates.host_devices import HostDevices
from agent.gates.worker import GateWorker
from agent.logs import Event
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0


class OffSwitch:
    """Follows the ceiling of the node's modes."""

    def __init__(
        self,
        gate_worker: GateWorker,
        modes: PodModes,
        store: PodStore,
        *,
        host_devices: HostDevices,
        on_changed: Callable[[], None],
    ) -> None:
        """on_changed: called after each change, for what follows the programs."""
        self._gate_worker = gate_worker
        self._modes = modes
        self._store = store
        self._host_devices = host_devices
        self._on_changed = on_changed
        self._changes = modes.changes.subscribe()
        self._problem = ""

    async def open(self) -> None:
        """Attach, unless podgate is off; then nothing is attached, not for a moment.

        Raises `TimeoutError`.
        """
        if not self._modes.node.is_off:
            await self._gate_worker.attach()
        else:
            await self._detach()

    async def run(self) -> None:
        """Follow the ceiling until cancelled."""
        while True:
            self._changes.take()
            if self._modes.node.is_off == self._gate_worker.is_attached or self._problem:
                await self._switch()
            try:
                async with asyncio.timeout(_RETRY_SECONDS if self._problem else None):
                    await self._changes.wait()
            except TimeoutError:
                continue

    def remains(self) -> list[str]:
        """What of gates and programs is in force, by kind."""
        kinds = {
            "gates": any(state.gates for state in self._store.states()),
            "hooks": self._gate_worker.is_attached or bool(self._problem),
            "programs on host devices": self._host_devices.has_programs,
        }
        return [kind for kind, is_in_force in kinds.items() if is_in_force]

    async def _switch(self) -> None:
        if not self._modes.node.is_off:
            self._problem = ""
            await self._gate_worker.attach()
            # Also pods whose mode is as before: their gates were opened, and not yet detached.
            self._store.mark_all()
            log.info(Event.SWITCHED_ON)
        elif await self._detach():
            log.warning(Event.SWITCHED_OFF, reason=self._modes.node.ceiling_from)
        self._on_changed()

    async def _detach(self) -> bool:
        """Whether it is done; otherwise `run` repeats it. Gates of pods open at once, and those of
        relays stay until these are released: nothing installs them again."""
        gates = [ifindex for state in self._store.states() for ifindex in state.gates]
        try:
            await self._gate_worker.run_first(self._gate_worker.gates.open, gates)
            await self._gate_worker.detach()
        except OSError as error:
            problem = str(error) or "the kernel did not respond in time"
            if problem != self._problem:
                log.error(Event.HOOKS_NOT_DETACHED, error=problem)
            self._problem = problem
            return False
        self._problem = ""
        return True
