"""Watches what `Sandboxes` tells, and waits until it has told something."""

import asyncio
import contextlib
import os
import pathlib
from collections.abc import AsyncIterator, Callable

from agent.cri.client import CALL_SECONDS, Runtime, RuntimeClient
from agent.cri.models import CriContainer, Sandbox
from agent.cri.sandbox_netns import NetnsLocator
from agent.cri.sandboxes import Sandboxes

_PATIENCE_SECONDS = 60 * float(os.environ.get("PODGATE_TEST_PATIENCE", "1"))
_POLL_SECONDS = 0.005


class Watched:
    """The follower, and all that it has told so far, as words and ids."""

    def __init__(self, sandboxes: Callable[["Watched"], Sandboxes]) -> None:
        self.told: list[tuple[str, str]] = []
        self.sandboxes = sandboxes(self)

    def on_sandbox(self, sandbox: Sandbox) -> None:
        self.told.append(("sandbox", sandbox.id))

    def on_removed(self, sandbox: Sandbox) -> None:
        self.told.append(("removed", sandbox.id))

    def on_containers(self, sandbox: Sandbox, containers: tuple[CriContainer, ...]) -> None:
        self.told.append(("containers", sandbox.id))

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        """Fails with `what` when it does not come true."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
        while not holds():
            in_time = asyncio.get_running_loop().time() < deadline
            assert in_time, f"{what} did not come true: {self.told}, {self.sandboxes.problem}"
            await asyncio.sleep(_POLL_SECONDS)

    async def relisted(self, times: int = 2) -> None:
        """Until the runtime was asked so often again."""
        wanted = self.sandboxes.relists + times
        while self.sandboxes.relists < wanted:
            self.sandboxes.hint()
            await asyncio.sleep(_POLL_SECONDS)


@contextlib.asynccontextmanager
async def following(
    socket: pathlib.Path,
    *,
    wrap: Callable[[RuntimeClient], Runtime] | None = None,
    call_seconds: float = CALL_SECONDS,
) -> AsyncIterator[Watched]:
    """A follower of the runtime at this socket, running. wrap: something in between."""

    async def open_wrapped() -> Runtime:
        runtime = RuntimeClient(socket, call_seconds=call_seconds)
        return wrap(runtime) if wrap else runtime

    locator = NetnsLocator()
    try:
        watched = Watched(
            lambda told: Sandboxes(
                open_wrapped,
                locator.locate,
                on_sandbox=told.on_sandbox,
                on_removed=told.on_removed,
                on_containers=told.on_containers,
            )
        )
        running = asyncio.create_task(watched.sandboxes.run())
        try:
            yield watched
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    finally:
        locator.close()
