"""Crowds: many pods that start at once, whose gates are attached quickly and settled later.

The kernel attaches a tcx link in 15 ms, under RTNL: one after the other, while network plugins,
which make the interfaces of further pods, wait for that lock. A filter is attached in less than a
millisecond. It serves as well for a while, but any process that configures the interface may remove
it, and later tcx programs run before it. So gates of a crowd are filters, and become links when
fewer pods wait.
"""

import asyncio
from collections.abc import Collection

import structlog

from agent.gates.failures import has_vanished
from agent.gates.worker import GateWorker
from agent.logs import Event
from agent.pods.store import PodStore
from bpf.errors import AttachError
from bpf.gates import Gates

log = structlog.get_logger(__name__)

# Fewer pods are gated by links in less time than one of them takes to start.
_PODS = 8
# On a busy node a crowd's pods come with gaps.
_CALM_SECONDS = 3.0
# To settle a gate takes 30 ms or more under RTNL, as long as the kernel's RCU needs. The pause
# before the next one, as a multiple of that: others have the lock meanwhile. In a crowd these are
# network plugins.
_PAUSE, _PAUSE_IN_CROWD = 3, 20
_RETRY_SECONDS = 1.0


class Crowds:
    """Recognises crowds by the pods in the store, and settles their gates."""

    def __init__(self, gate_worker: GateWorker, store: PodStore) -> None:
        self._run = gate_worker.run
        self._gates = gate_worker.gates
        self._store = store
        self._arrived = asyncio.Event()
        self._until = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether gates are to be attached quickly."""
        return asyncio.get_running_loop().time() < self._until

    def arrive(self) -> None:
        """A pod is about to get its first gate."""
        waiting = sum(
            state.gated_netns is None and not state.pod.host_network
            for state in self._store.states()
        )
        if waiting >= _PODS or self.is_under_way:
            self._until = asyncio.get_running_loop().time() + _CALM_SECONDS
            self._arrived.set()

    async def run(self) -> None:
        """Settle the gates of each crowd, until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            for ifindex in sorted(await self._run(_unsettled, self._gates)):
                seconds = await self._settle(ifindex)
                await asyncio.sleep(seconds * (_PAUSE_IN_CROWD if self.is_under_way else _PAUSE))
            if await self._run(_unsettled, self._gates) or self.is_under_way:
                self._arrived.set()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _settle(self, ifindex: int) -> float:
        """Returns how many seconds it took."""
        now = asyncio.get_running_loop().time
        started = now()
        try:
            while await self._run(self._gates.settle, ifindex):
                pass
        except (AttachError, OSError) as error:
            # The pod is being deleted, or its next pass attaches the gate as a link.
            if not has_vanished(error):
                log.warning(Event.GATE_NOT_SETTLED, ifindex=ifindex, error=str(error))
            self._store.mark_interfaces({ifindex})
        return now() - started


def _unsettled(gates: Gates) -> Collection[int]:
    """In the worker's thread, which changes it."""
    return gates.unsettled
