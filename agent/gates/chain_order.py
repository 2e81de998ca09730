"""Keeps each gate first in its interface's program chain, with a bounded number of moves.

The gate is attached first, but a program that is attached later may come before it, and a program
that returns TC_ACT_OK ends the chain: the gate never sees the packet. `agent.gates.gate_watch`
finds such gates and marks their pods.
"""

import asyncio
import collections
from collections.abc import Callable, Collection

import structlog

from agent.gates.failures import has_vanished, is_interface_gone
from agent.gates.metrics import GateMetrics
from agent.gates.worker import GateWorker
from agent.linux.pod_network import HostInterface
from agent.logs import Event
from bpf.errors import AttachError, BpfError, CompileError, PinError

log = structlog.get_logger(__name__)

# A program that moves first again and again will not stop. Each move takes 20 ms under RTNL.
_MOVES = 3
_WINDOW_SECONDS = 60.0
# The last of these moves waits: a program that attaches several filters at once has ended by then.
_LAST_AFTER_SECONDS = 2.0


class ChainOrder:
    """The positions of gates in their chains."""

    def __init__(
        self,
        gate_worker: GateWorker,
        metrics: GateMetrics,
        *,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._gate_worker = gate_worker
        self._run = gate_worker.run
        self._gates = gate_worker.gates
        self._metrics = metrics
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._moves: dict[int, collections.deque[float]] = {}
        self._reported: dict[int, str] = {}
        """By ifindex: the problem that was logged last."""

    async def ensure_first(self, interface: HostInterface, *, is_deleting: bool = False) -> str:
        """Move the gate before other programs, three times a minute at most.

        One sentence if another program still runs before it, or if that is not known. is_deleting:
        the pod's deletion may remove gate and interface meanwhile.
        """
        try:
            return await self._ensure_first(interface, is_deleting=is_deleting)
        except BpfError as error:
            # The gate was attached first; what was attached since is not known.
            return self._report(
                interface,
                f"Programs on {interface.name} cannot be read ({error.strerror}), and one that "
                "runs before the gate may accept packets; list them with "
                f"'bpftool net show dev {interface.name}'.",
            )

    async def _ensure_first(self, interface: HostInterface, *, is_deleting: bool) -> str:
        ifindex = interface.ifindex
        if await self._run(self._gates.is_first, ifindex):
            self.found_first(ifindex)
            return ""
        moves = self._moves.setdefault(ifindex, collections.deque(maxlen=_MOVES))
        if self._may_move(moves):
            moves.append(self._now())
            try:
                await self._gate_worker.move_first(ifindex)
            except (AttachError, PinError, CompileError) as error:
                if is_interface_gone(error) or (is_deleting and has_vanished(error)):
                    # podgate-cni removes the gate, then the network plugin the interface.
                    return ""
                return self._displaced(interface, f"the gate cannot be moved ({error})")
            self._metrics.gates_reordered.inc()
            log.warning(Event.GATE_MOVED_FIRST, interface=interface.name, ifindex=ifindex)
            if await self._run(self._gates.is_first, ifindex):
                return ""
        return self._displaced(interface, "attach it after the gate")

    def _may_move(self, moves: Collection[float]) -> bool:
        now = self._now()
        recent = [at for at in moves if now - at <= _WINDOW_SECONDS]
        if len(recent) < _MOVES - 1:
            return True
        return len(recent) < _MOVES and now - recent[-1] > _LAST_AFTER_SECONDS

    def found_first(self, ifindex: int) -> None:
        """No program runs before the gate: the next one that does is logged again."""
        self._reported.pop(ifindex, None)

    def forget(self, ifindex: int) -> None:
        """The interface is gone, or no longer gated."""
        self._moves.pop(ifindex, None)
        self._reported.pop(ifindex, None)

    def _displaced(self, interface: HostInterface, what: str) -> str:
        return self._report(
            interface,
            f"Another program runs before the gate on {interface.name}, and packets it accepts "
            f"pass no gate; {what}.",
        )

    def _report(self, interface: HostInterface, problem: str) -> str:
        if self._reported.get(interface.ifindex) != problem:
            self._reported[interface.ifindex] = problem
            log.error(Event.GATE_DISPLACED, interface=interface.name, problem=problem)
        return problem
