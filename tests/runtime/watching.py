"""Records the callbacks of `Sandboxes`, and waits for them."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable

from agent.cri.client import CALL_SECONDS, Runtime, RuntimeClient
from agent.cri.models import CriContainer, Sandbox
from agent.cri.sandbox_netns import NetnsLocator
from agent.cri.sandboxes import Sandboxes
from tests import polling


class Watched:
    """Sandboxes, and all callbacks so far, as name and id."""

    def __init__(self, sandboxes: Callable[["Watched"], Sandboxes]) -> None:
        self.calls: list[tuple[str, str]] = []
        self.sandboxes = sandboxes(self)

    def on_sandbox(self, sandbox: Sandbox) -> None:
        self.calls.append(("sandbox", sandbox.id))

    def on_removed(self, sandbox: Sandbox) -> None:
        self.calls.append(("removed", sandbox.id))

    def on_containers(self, sandbox: Sandbox, containers: tuple[CriContainer, ...]) -> None:
        self.calls.append(("containers", sandbox.id))

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        """Fails with `what` and the callbacks if it does not hold in time."""
        try:
            await polling.until(what, holds)
        except polling.TimedOutError as error:
            raise AssertionError(f"{error}: {self.calls}, {self.sandboxes.problem}") from error

    async def relisted(self, times: int = 2) -> None:
        """Wait until the runtime has been listed this often again."""
        last = self.sandboxes.relists + times

        def is_done() -> bool:
            self.sandboxes.hint()
            return self.sandboxes.relists >= last

        await polling.until("the runtime is listed again", is_done)


@contextlib.asynccontextmanager
async def following(
    socket: pathlib.Path,
    *,
    wrap: Callable[[RuntimeClient], Runtime] | None = None,
    call_seconds: float = CALL_SECONDS,
) -> AsyncIterator[Watched]:
    """Running `Sandboxes` of the runtime at this socket. wrap: replaces its client."""

    async def open_wrapped() -> Runtime:
        runtime = RuntimeClient(socket, call_seconds=call_seconds)
        return wrap(runtime) if wrap else runtime

    locator = NetnsLocator()
    try:
        watched = Watched(
            lambda watched: Sandboxes(
                open_wrapped,
                locator.locate,
                on_sandbox=watched.on_sandbox,
                on_removed=watched.on_removed,
                on_containers=watched.on_containers,
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
