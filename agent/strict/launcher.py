"""Starts a relay: its process, network namespace, veth pair and gate."""

import asyncio
import contextlib
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import structlog

from agent.logs import Event
from agent.relay import interfaces as relay_interfaces
from agent.relay import messages
from agent.settings import RelayRanges
from agent.strict import orphans, veth_pair, way
from agent.strict import process as relay_process
from agent.strict import ranges as strict_ranges
from agent.strict.check import NO_COOKIE
from agent.strict.predecessors import Predecessors
from agent.strict.process import RelayChannel, RelayError, RelayProcess
from agent.strict.relay_gates import RelayGates
from agent.strict.veth_pair import PairError, VethPair
from bpf import pins, sources
from bpf.errors import AttachError, BpfError
from bpf.redirect import redirected_addresses, seconds_since_beat
from probes.netns import Netns, NetnsError, netns_cookie

if TYPE_CHECKING:
    from agent.strict.stats import ConnectionStats

log = structlog.get_logger(__name__)

# bpf/src/abi.h: RELAY_BEAT_LIMIT_NS. Then the hooks redirect nothing.
_HUNG_SECONDS = 0.3


class RelayHandle(Protocol):
    """A running relay."""

    channel: RelayChannel

    async def find_way_problem(self, *, is_engaged: bool) -> str:
        """Why the node's connections do not reach it, as a clause; "" if they do, or if it is
        engaged and redirects none at the moment."""

    async def kill(self) -> None:
        """Kill it, and remove its interface."""

    def release(self) -> None:
        """Let it continue without this agent."""


class ProcessLauncher:
    """Starts relay processes with gated interfaces."""

    def __init__(
        self,
        ranges: RelayRanges,
        *,
        bpffs: pathlib.Path,
        cgroup: pathlib.Path,
        gates: RelayGates,
        orphan_seconds: float,
    ) -> None:
        """cgroup: the root's directory; orphan_seconds: how long relays run without an agent."""
        self._ranges = ranges
        self._bpffs = bpffs
        self._cgroup = cgroup
        self._gates = gates
        self._orphan_seconds = orphan_seconds

    async def check(self) -> None:
        """As `RelayGates.check`."""
        await self._gates.check()

    async def find_predecessors(self, now: Callable[[], float]) -> Predecessors:
        """Relays of previous agents. To be called before `launch`. now: as of the event loop."""
        try:
            found = await orphans.find()
        except OSError as error:
            log.error(Event.RELAY_INTERFACE_UNREADABLE, error=str(error))
            found = []
        if found:
            log.info(Event.PREVIOUS_RELAY_FOUND, pids=[process.pid for process in found])
        have_these_maps = bool(found) and bool(self.redirected())
        return Predecessors(found, have_these_maps=have_these_maps, now=now)

    def redirected(self) -> set[str]:
        """Addresses of pods to which connects are redirected."""
        try:
            return set(map(str, redirected_addresses(pins.Pins(self._bpffs))))
        except BpfError:
            return set()  # no map, so nothing is redirected by it

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
        relay = _RunningRelay(process, channel, pins.Pins(self._bpffs))
        try:
            await self._start(relay, slot)
        except BaseException:
            await relay.kill()
            raise
        return relay

    async def _start(self, relay: "_RunningRelay", slot: int) -> None:
        subnets = [str(share.subnet) for share in strict_ranges.shares(self._ranges, slot)]
        configuration = messages.Configure(
            str(self._bpffs),
            sources.fingerprint(),
            str(self._cgroup),
            subnets[0],
            subnets[1],
            veth_pair.INSIDE,
            orphan_seconds=self._orphan_seconds,
            tries_way=self._gates.agent_cgroup is not None,
        )
        await relay.channel.request(configuration, messages.NetnsReady)
        name = relay_interfaces.name_of(slot)

        async def gate(ifindex: int) -> None:
            await self._gates.gate(ifindex, name)

        try:
            netns = Netns.open(f"/proc/{relay.process.pid}/ns/net")
            pair = await veth_pair.make(slot, self._ranges, netns, gate=gate)
            relay.pair = pair
            relay.is_way_tried = self._gates.agent_cgroup is not None
        except (PairError, NetnsError, AttachError) as error:
            raise RelayError(str(error)) from error
        await relay.channel.request(messages.PairReady(pair.ifindex), messages.RelayReady)
        log.info(Event.RELAY_STARTED, pid=relay.process.pid, interface=pair.name)


class _RunningRelay:
    """A relay's process, its channel and its interface."""

    def __init__(
        self, process: RelayProcess, channel: RelayChannel, installation: pins.Pins
    ) -> None:
        self._pins = installation
        self.process = process
        self.channel = channel
        self.pair: VethPair | None = None
        self.is_way_tried = False

    async def find_way_problem(self, *, is_engaged: bool) -> str:
        """Also repairs what of the way is podgate's own, and tries again."""
        if self.pair is None or not self.is_way_tried:
            return ""
        addresses = [share.way for share in self.pair.shares]
        if not await way.find_problem(addresses):
            return ""
        try:
            await veth_pair.repair(self.pair)
            # The second failure in a row counts: on a busy node one response may be late.
            problem = await way.find_problem(addresses)
            if is_engaged and problem and seconds_since_beat(self._pins) > _HUNG_SECONDS:
                return ""  # it hangs, which its missing reports show
        except (PairError, BpfError) as error:
            return str(error).rstrip(".")
        if not problem:
            log.warning(Event.RELAY_WAY_REPAIRED, interface=self.pair.name)
            return ""
        return problem + (await veth_pair.diversion(self.pair) or await way.suspects())

    async def kill(self) -> None:
        self.channel.close()
        await self.process.kill()
        # The kernel removes a namespace later, and the name is needed again.
        if self.pair is not None:
            with contextlib.suppress(PairError):
                await veth_pair.remove(self.pair.ifindex)

    def release(self) -> None:
        self.channel.close()
        self.process.release()
