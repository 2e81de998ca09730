"""Starts a relay: its process, network namespace, veth pair and gate."""

import asyncio
import contextlib
import pathlib
import socket
from typing import TYPE_CHECKING, Protocol

import structlog

from agent.default_deny.controller import DefaultDenyController
from agent.gates.injectable import InjectableInterfaces
from agent.gates.worker import GateWorker, netns_cookie
from agent.logs import Event
from agent.pods.store import PodStore
from agent.relay import interfaces as relay_interfaces
from agent.relay import messages
from agent.settings import RelayRanges
from agent.strict import process as relay_process
from agent.strict import ranges as strict_ranges
from agent.strict import veth_pair
from agent.strict.check import NO_COOKIE
from agent.strict.process import RelayChannel, RelayError, RelayProcess
from agent.strict.veth_pair import PairError
from bpf.errors import AttachError
from bpf.gates import GateConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode
from probes.netns import Netns, NetnsError

if TYPE_CHECKING:
    from agent.strict.stats import ConnectionStats

log = structlog.get_logger(__name__)

# Only the kubelet sends to a relay; the relay itself checks the ports.
_GATE = GateConfig(
    Mode.ENFORCE, (), (Rule(SourceKind.KUBELET, socket.IPPROTO_TCP),), any_address=True
)


class RelayHandle(Protocol):
    """A running relay."""

    channel: RelayChannel

    async def kill(self) -> None:
        """Kill it, and remove its interface."""

    def release(self) -> None:
        """Let it continue without this agent."""


class ProcessLauncher:
    """Starts relay processes, and attaches gates to their interfaces."""

    def __init__(
        self,
        *,
        gate_worker: GateWorker,
        ranges: RelayRanges,
        bpffs: pathlib.Path,
        cgroup: pathlib.Path,
        store: PodStore,
        default_deny: DefaultDenyController,
        injectable: InjectableInterfaces,
    ) -> None:
        """cgroup: the root's directory; store: has the relays' gated interfaces for the others."""
        self._gate_worker = gate_worker
        self._ranges = ranges
        self._bpffs = bpffs
        self._cgroup = cgroup
        self._store = store
        self._default_deny = default_deny
        self._injectable = injectable
        self._pairs: set[int] | None = None
        """Interfaces that drop what is forwarded to relays; None: as a previous agent left them."""

    async def check(self) -> None:
        """Gate the relays of a previous agent, and detach from removed ones; idempotent."""
        try:
            present = relay_interfaces.present()
            for ifindex, name in present.items():
                if ifindex not in self._store.relay_gates:
                    await self._gate(ifindex, name)
            for ifindex in self._store.relay_gates.keys() - present.keys():
                await self._gate_worker.remove(ifindex)
                await self._mark_injectable(ifindex, is_node_sent=False)
                del self._store.relay_gates[ifindex]
            await self._ensure_pairs(set(present))
        except (AttachError, OSError, TimeoutError) as error:
            log.error(Event.RELAY_INTERFACE_UNREADABLE, error=str(error))

    async def ensure_ranges(self) -> None:
        """Restore the routes of the ranges. Raises `RelayError`."""
        try:
            await veth_pair.ensure_range_routes(self._ranges)
        except PairError as error:
            raise RelayError(str(error)) from error

    async def launch(self, stats: "ConnectionStats", wake: asyncio.Event) -> RelayHandle:
        """stats, wake: as of `RelayChannel.open`. Raises `RelayError`; then nothing is left."""
        if netns_cookie() is None:
            raise RelayError(NO_COOKIE)
        try:
            await veth_pair.add_range_routes(self._ranges)
            slot = veth_pair.reserve_slot()
            process, control = relay_process.spawn()
        except PairError as error:
            raise RelayError(str(error)) from error
        except OSError as error:
            raise RelayError(f"its process cannot be started: {error}") from error
        channel = await RelayChannel.open(control, stats=stats, wake=wake)
        relay = _RunningRelay(process, channel)
        try:
            await self._start(relay, slot)
        except BaseException:
            await relay.kill()
            raise
        return relay

    async def _start(self, relay: "_RunningRelay", slot: int) -> None:
        subnets = [str(share.subnet) for share in strict_ranges.shares(self._ranges, slot)]
        configuration = messages.Configure(
            str(self._bpffs), str(self._cgroup), subnets[0], subnets[1], veth_pair.INSIDE
        )
        await relay.channel.request(configuration, messages.NetnsReady)
        name = relay_interfaces.name_of(slot)

        async def gate(ifindex: int) -> None:
            await self._gate(ifindex, name)

        try:
            netns = Netns.open(f"/proc/{relay.process.pid}/ns/net")
            pair = await veth_pair.make(slot, self._ranges, netns, gate=gate)
            relay.ifindex = pair.ifindex
        except (PairError, NetnsError, AttachError) as error:
            raise RelayError(str(error)) from error
        await relay.channel.request(messages.PairReady(pair.ifindex), messages.RelayReady)
        log.info(Event.RELAY_STARTED, pid=relay.process.pid, interface=pair.name)

    async def _gate(self, ifindex: int, name: str) -> None:
        # The relay has sent no packet yet, so none can be a reply.
        worker = self._gate_worker
        await worker.run(worker.gates.install, ifindex, _GATE)
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


class _RunningRelay:
    """A relay's process, its channel and its interface."""

    def __init__(self, process: RelayProcess, channel: RelayChannel) -> None:
        self.process = process
        self.channel = channel
        self.ifindex: int | None = None

    async def kill(self) -> None:
        self.channel.close()
        await self.process.kill()
        # The kernel removes a namespace later, and the name is needed again.
        if self.ifindex is not None:
            with contextlib.suppress(PairError):
                await veth_pair.remove(self.ifindex)

    def release(self) -> None:
        self.channel.close()
        self.process.release()
