"""A relay that responds as expected over a real socket pair, and fails on demand."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable

from agent.relay import messages
from agent.strict.predecessors import Predecessors
from agent.strict.process import RelayChannel, RelayError
from agent.strict.stats import ConnectionStats


class ScriptedRelay:
    """Both ends: the supervisor's handle, and the relay behind it."""

    channel: RelayChannel

    def __init__(self) -> None:
        self.received: list[messages.ToRelay] = []
        self.rejects: dict[str, str] = {}
        self.is_hung = False
        """Neither responds nor reports."""
        self.way_problem = ""
        self.way_tries: list[bool] = []
        """Whether it was engaged at each."""
        self.is_killed = False
        self.is_released = False
        self._ours, self._its = socket.socketpair()
        self._tasks: list[asyncio.Task[None]] = []
        self._targets: dict[str, messages.RelayTargetSpec] = {}

    async def start(self, stats: ConnectionStats, wake: asyncio.Event) -> None:
        self.channel = await RelayChannel.open(self._ours, stats=stats, wake=wake)
        self._reader, self._writer = await asyncio.open_connection(sock=self._its)
        self._tasks = [asyncio.create_task(self._respond()), asyncio.create_task(self._report())]

    def targets(self) -> set[str]:
        """Addresses of all that it has."""
        return {target.address for target in self._targets.values()}

    def lose_targets(self) -> None:
        self._targets.clear()

    def updates(self) -> list[messages.SetTargets | messages.ChangeTargets]:
        """Messages about targets, in their order."""
        kinds = (messages.SetTargets, messages.ChangeTargets)
        return [each for each in self.received if isinstance(each, kinds)]

    def has_received(self, kind: type[messages.ToRelay]) -> bool:
        return any(isinstance(each, kind) for each in self.received)

    def send(self, message: messages.FromRelay) -> None:
        self._writer.write(messages.pack(message))

    def exit(self) -> None:
        """As when the process exits."""
        for task in self._tasks:
            task.cancel()
        self._writer.close()

    def end_channel(self) -> None:
        """Send nothing more, and read on."""
        self.is_hung = True
        self._writer.write_eof()

    async def find_way_problem(self, *, is_engaged: bool) -> str:
        self.way_tries.append(is_engaged)
        return self.way_problem

    async def kill(self) -> None:
        self.is_killed = True
        self.channel.close()
        self.exit()

    def release(self) -> None:
        self.is_released = True
        self.channel.close()

    async def _respond(self) -> None:
        frames = messages.Frames()
        while received := await self._reader.read(1 << 16):
            for body in frames.feed(received):
                message = messages.decode_for_relay(body)
                self.received.append(message)
                if self.is_hung:
                    continue
                if isinstance(message, messages.SetTargets):
                    self._targets.clear()
                    self._apply(message.revision, message.targets, ())
                elif isinstance(message, messages.ChangeTargets):
                    self._apply(message.revision, message.changed, message.removed)
                elif isinstance(message, messages.Engage):
                    self.send(messages.Engaged())

    def _apply(
        self,
        revision: int,
        changed: Iterable[messages.RelayTargetSpec],
        removed: Iterable[str],
    ) -> None:
        for key in removed:
            self._targets.pop(key, None)
        rejected = {}
        for target in changed:
            self._targets[target.key] = target
            if why := self.rejects.get(target.key):
                rejected[target.key] = why
        self.send(messages.TargetsApplied(revision, rejected))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(1)
            if not self.is_hung:
                self.send(
                    messages.RelayReport(connections=1, held_syns=0, is_full=False, samples=())
                )


class ScriptedPredecessor:
    """The process of a relay of another agent."""

    pid = 4711

    def __init__(self) -> None:
        self.is_running = True
        self.is_released = False
        self.is_forgotten = False

    def request_release(self) -> None:
        self.is_released = True

    async def kill(self) -> None:
        self.is_running = False

    def release(self) -> None:
        self.is_forgotten = True


class ScriptedLauncher:
    """Starts scripted relays."""

    def __init__(self) -> None:
        self.relays: list[ScriptedRelay] = []
        self.next = ScriptedRelay
        self.problem: str | None = None
        self.checks = 0
        """How often the gates of relays were checked."""
        self.range_problem: str | None = None
        self.ranges = 0
        """How often the routes of ranges were restored."""
        self.tried_at: list[float] = []
        self.predecessors: list[ScriptedPredecessor] = []
        self.have_these_maps = True
        self.addresses: set[str] = set()
        """Of pods to which connects are redirected."""

    @property
    def newest(self) -> ScriptedRelay:
        return self.relays[-1]

    def killed(self) -> list[ScriptedRelay]:
        return [relay for relay in self.relays if relay.is_killed]

    async def check(self) -> None:
        self.checks += 1

    async def find_predecessors(self, now: Callable[[], float]) -> Predecessors:
        return Predecessors(self.predecessors, have_these_maps=self.have_these_maps, now=now)

    def redirected(self) -> set[str]:
        return self.addresses

    async def ensure_ranges(self) -> None:
        self.ranges += 1
        if self.range_problem is not None:
            raise RelayError(self.range_problem)

    async def launch(self, stats: ConnectionStats, wake: asyncio.Event) -> ScriptedRelay:
        self.tried_at.append(asyncio.get_running_loop().time())
        if self.problem is not None:
            raise RelayError(self.problem)
        await self.ensure_ranges()
        relay = self.next()
        await relay.start(stats, wake)
        self.relays.append(relay)
        return relay

    async def close(self) -> None:
        """Close every socket, and end every task."""
        for relay in self.relays:
            await relay.kill()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*relay._tasks, return_exceptions=True)
        await asyncio.sleep(0)
