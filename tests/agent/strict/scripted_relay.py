"""A relay that answers by the book over a real socket pair, and fails when a test says so."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from agent.relay import messages
from agent.strict.process import Conversation, RelayError


class ScriptedRelay:
    """Both ends: what `Relaying` holds, and the relay behind it."""

    conversation: Conversation

    def __init__(self) -> None:
        self.heard: list[messages.ToRelay] = []
        self.refuses: dict[str, str] = {}
        self.is_hung = False
        """Neither answers nor reports."""
        self.is_killed = False
        self.is_left = False
        self._ours, self._its = socket.socketpair()
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(
        self, on_report: Callable[[messages.RelayReport], None], on_end: Callable[[], None]
    ) -> None:
        self.conversation = await Conversation.open(self._ours, on_report=on_report, on_end=on_end)
        self._reader, self._writer = await asyncio.open_connection(sock=self._its)
        self._tasks = [asyncio.create_task(self._answer()), asyncio.create_task(self._report())]

    def wanted(self) -> set[str]:
        """Addresses of the newest `Want`."""
        wants = [each for each in self.heard if isinstance(each, messages.SetTargets)]
        return {target.address for target in wants[-1].targets}

    def has_heard(self, kind: type[messages.ToRelay]) -> bool:
        return any(isinstance(each, kind) for each in self.heard)

    def say(self, message: messages.FromRelay) -> None:
        self._writer.write(messages.pack(message))

    def end(self) -> None:
        """As when the process ends, however."""
        for task in self._tasks:
            task.cancel()
        self._writer.close()

    async def kill(self) -> None:
        self.is_killed = True
        self.conversation.close()
        self.end()

    def leave(self) -> None:
        self.is_left = True
        self.conversation.close()

    async def _answer(self) -> None:
        frames = messages.Frames()
        while received := await self._reader.read(1 << 16):
            for body in frames.feed(received):
                message = messages.decode_for_relay(body)
                self.heard.append(message)
                if self.is_hung:
                    continue
                if isinstance(message, messages.SetTargets):
                    keys = {target.key for target in message.targets}
                    refused = {key: why for key, why in self.refuses.items() if key in keys}
                    self.say(messages.TargetsApplied(message.revision, refused))
                elif isinstance(message, messages.Engage):
                    self.say(messages.Engaged())

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(1)
            if not self.is_hung:
                self.say(
                    messages.RelayReport(connections=1, held_syns=0, is_full=False, samples=())
                )


class ScriptedLauncher:
    """Starts such relays."""

    def __init__(self) -> None:
        self.relays: list[ScriptedRelay] = []
        self.next = ScriptedRelay
        self.problem: str | None = None
        self.range_problem: str | None = None
        self.tried_at: list[float] = []

    @property
    def newest(self) -> ScriptedRelay:
        return self.relays[-1]

    def killed(self) -> list[ScriptedRelay]:
        return [relay for relay in self.relays if relay.is_killed]

    async def look(self) -> None:
        pass

    async def ensure_ranges(self) -> None:
        if self.range_problem is not None:
            raise RelayError(self.range_problem)

    async def launch(
        self, on_report: Callable[[messages.RelayReport], None], on_end: Callable[[], None]
    ) -> ScriptedRelay:
        self.tried_at.append(asyncio.get_running_loop().time())
        if self.problem is not None:
            raise RelayError(self.problem)
        await self.ensure_ranges()
        relay = self.next()
        await relay.begin(on_report, on_end)
        self.relays.append(relay)
        return relay

    async def close(self) -> None:
        """Let every socket and task end."""
        for relay in self.relays:
            await relay.kill()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*relay._tasks, return_exceptions=True)
        await asyncio.sleep(0)
