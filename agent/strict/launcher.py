"""Starting a relay: process, namespace, pair and gate, until it can be told what to carry."""

import contextlib
import pathlib
import socket
from collections.abc import Callable
from typing import Protocol

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
from agent.strict.process import Conversation, Process, RelayError
from agent.strict.veth_pair import PairError
from bpf.errors import AttachError
from bpf.gates import GateConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode
from probes.netns import Netns, NetnsError

log = structlog.get_logger(__name__)

# Whatever is sent into a pair comes from the kubelet; the relay itself knows for which ports.
_GATE = GateConfig(
    Mode.ENFORCE, (), (Rule(SourceKind.KUBELET, socket.IPPROTO_TCP),), any_address=True
)


class Launched(Protocol):
    """A relay that can be told what to carry."""

    conversation: Conversation

    async def kill(self) -> None:
        """End it, and take its interface away."""

    def leave(self) -> None:
        """Let it live on without us."""


class Launcher:
    """Starts relays for one agent, and keeps their interfaces gated."""

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

    async def look(self) -> None:
        """Gate what relays of an earlier agent left, and forget what is gone; safe to repeat."""
        try:
            present = relay_interfaces.present()
            for ifindex, name in present.items():
                if ifindex not in self._store.relay_gates:
                    await self._gate(ifindex, name)
            for ifindex in self._store.relay_gates.keys() - present.keys():
                await self._gate_worker.remove(ifindex)
                await self._gate_worker.mark_origins({ifindex: False})
                del self._store.relay_gates[ifindex]
        except (AttachError, OSError, TimeoutError) as error:
            log.error("a relay's interface could not be looked at", error=str(error))

    async def ensure_ranges(self) -> None:
        """As `veth_pair.ensure_range_routes`. Raises `RelayError`."""
        try:
            await veth_pair.ensure_range_routes(self._ranges)
        except PairError as error:
            raise RelayError(str(error)) from error

    async def launch(
        self, on_report: Callable[[messages.RelayReport], None], on_end: Callable[[], None]
    ) -> Launched:
        """Raises `RelayError`; then nothing is left of it."""
        if netns_cookie() is None:
            raise RelayError(NO_COOKIE)
        try:
            await veth_pair.add_range_routes(self._ranges)
            slot = veth_pair.reserve_slot()
            process, control = relay_process.spawn()
        except PairError as error:
            raise RelayError(str(error)) from error
        except OSError as error:
            raise RelayError(f"it cannot be started: {error}") from error
        conversation = await Conversation.open(control, on_report=on_report, on_end=on_end)
        relay = _Running(process, conversation)
        try:
            await self._begin(relay, slot)
        except BaseException:
            await relay.kill()
            raise
        return relay

    async def _begin(self, relay: "_Running", slot: int) -> None:
        subnets = [str(share.subnet) for share in strict_ranges.shares(self._ranges, slot)]
        start = messages.Configure(
            str(self._bpffs), str(self._cgroup), subnets[0], subnets[1], veth_pair.INSIDE
        )
        await relay.conversation.ask(start, messages.NetnsReady)
        name = relay_interfaces.name_of(slot)

        async def gate(ifindex: int) -> None:
            await self._gate(ifindex, name)

        try:
            netns = Netns.open(f"/proc/{relay.process.pid}/ns/net")
            pair = await veth_pair.make(slot, self._ranges, netns, gate=gate)
            relay.ifindex = pair.ifindex
        except (PairError, NetnsError, AttachError) as error:
            raise RelayError(str(error)) from error
        await relay.conversation.ask(messages.PairReady(pair.ifindex), messages.RelayReady)
        log.info(Event.RELAY_STARTED, pid=relay.process.pid, interface=pair.name)

    async def _gate(self, ifindex: int, name: str) -> None:
        # Whoever is behind it has asked for nothing, so nothing is an answer.
        await self._gate_worker.install(ifindex, _GATE, grace_seconds=0)
        await self._gate_worker.ensure_pairs({*relay_interfaces.present(), ifindex})
        # What comes out of it, the relay has made, or the node before it.
        await self._gate_worker.mark_origins({ifindex: True})
        self._store.relay_gates[ifindex] = name
        self._injectable.hint()
        await self._default_deny.add_gated({ifindex})


class _Running:
    """One relay's process, its conversation and its interface."""

    def __init__(self, process: Process, conversation: Conversation) -> None:
        self.process = process
        self.conversation = conversation
        self.ifindex: int | None = None

    async def kill(self) -> None:
        self.conversation.close()
        await self.process.kill()
        # The kernel takes a namespace away when it has time, and the name is wanted again.
        if self.ifindex is not None:
            with contextlib.suppress(PairError):
                await veth_pair.remove(self.ifindex)

    def leave(self) -> None:
        self.conversation.close()
        self.process.leave()
