"""The gates of relays' interfaces, and what drops traffic that is forwarded to relays."""

import asyncio
import socket
from collections.abc import Iterable, Mapping

import structlog

from agent.default_deny.controller import DefaultDenyController
from agent.gates.injectable import InjectableInterfaces
from agent.gates.worker import GateWorker
from agent.linux.cgroups import own_cgroup
from agent.logs import Event
from agent.pods.store import PodStore
from agent.relay import interfaces as relay_interfaces
from agent.strict import orphans
from bpf.errors import AttachError
from bpf.gates import GateConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)

# Only the kubelet sends to a relay; the relay itself checks the ports.
_KUBELET = Rule(SourceKind.KUBELET, socket.IPPROTO_TCP)


def _gate(cgroups: Iterable[int], *, identified_kubelet: bool) -> GateConfig:
    """cgroups: ids of those from which the way is tried: the agent's, and that of a relay without
    its agent; identified_kubelet: as of `GateConfig`."""
    port = relay_interfaces.WAY_PORT
    tries = [
        Rule(SourceKind.CGROUP, socket.IPPROTO_TCP, port, port, cgroup=cgroup)
        for cgroup in sorted(set(cgroups))
    ]
    rules = (_KUBELET, *tries)
    return GateConfig(
        Mode.ENFORCE, (), rules, any_address=True, identified_kubelet=identified_kubelet
    )


class RelayGates:
    """Gates relays' interfaces, also those of a previous agent."""

    def __init__(
        self,
        *,
        gate_worker: GateWorker,
        store: PodStore,
        default_deny: DefaultDenyController,
        injectable: InjectableInterfaces,
    ) -> None:
        """store: has the relays' gated interfaces for the others."""
        self._gate_worker = gate_worker
        self._store = store
        self._default_deny = default_deny
        self._injectable = injectable
        self.agent_cgroup = own_cgroup()
        """None where the way to a relay cannot be tried, since its gate cannot admit the agent."""
        self._pairs: set[int] | None = None
        """Interfaces that drop what is forwarded to relays; None: as a previous agent left them."""

    async def check(self) -> None:
        """Gate the relays of a previous agent, and detach from removed ones; idempotent."""
        try:
            present = relay_interfaces.present()
            if present.keys() - self._store.relay_gates.keys():
                await self._gate_previous(present)
            for ifindex in self._store.relay_gates.keys() - present.keys():
                await self._gate_worker.remove(ifindex)
                await self._mark_injectable(ifindex, is_node_sent=False)
                del self._store.relay_gates[ifindex]
            await self._ensure_pairs(set(present))
        except (AttachError, OSError) as error:
            log.error(Event.RELAY_INTERFACE_UNREADABLE, error=str(error))

    async def _gate_previous(self, present: Mapping[int, str]) -> None:
        """Those that this agent has not gated. Their relays try the way, too."""
        cgroups: set[int] = set()
        try:
            previous = await orphans.find()
            try:
                cgroups = await asyncio.to_thread(orphans.cgroup_ids, previous)
            finally:
                for process in previous:
                    process.release()
        except OSError as error:
            log.error(Event.RELAY_INTERFACE_UNREADABLE, error=str(error))
        # Hooks of another version redirect the kubelet that its agent has identified, also while
        # this one has not.
        is_identified = bool(self._gate_worker.config.read().kubelet_cgroup)
        for ifindex, name in present.items():
            if ifindex not in self._store.relay_gates:
                await self.gate(ifindex, name, cgroups, identified_kubelet=is_identified)

    async def gate(
        self,
        ifindex: int,
        name: str,
        cgroups: Iterable[int] = (),
        *,
        identified_kubelet: bool = True,
    ) -> None:
        """Gate a relay's interface. cgroups: ids of those from which its relay tries the way;
        identified_kubelet: as of `GateConfig`.

        Raises `AttachError`, `OSError` or `TimeoutError`.
        """
        own = () if self.agent_cgroup is None else (self.agent_cgroup,)
        gate = _gate((*own, *cgroups), identified_kubelet=identified_kubelet)
        # A new relay has sent no packet yet, so none can be a reply.
        worker = self._gate_worker
        await worker.run(worker.gates.install, ifindex, gate)
        await self._ensure_pairs({*relay_interfaces.present(), ifindex})
        # Packets from it were sent by the relay, or by the host before.
        await self._mark_injectable(ifindex, is_node_sent=True)
        self._store.relay_gates[ifindex] = name
        self._injectable.hint()
        await self._default_deny.add_gated({ifindex})

    async def _ensure_pairs(self, ifindexes: set[int]) -> None:
        if ifindexes != self._pairs:
            await self._gate_worker.run(self._gate_worker.host_devices.ensure_pairs, ifindexes)
            self._pairs = ifindexes

    async def _mark_injectable(self, ifindex: int, *, is_node_sent: bool) -> None:
        mark = self._gate_worker.injectable.mark
        await self._gate_worker.run(mark, ifindex, is_node_sent=is_node_sent)
