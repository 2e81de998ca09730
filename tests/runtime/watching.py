"""Records the changes of `Sandboxes`, and waits for them."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable

from agent.cri import sandbox_netns
from agent.cri.client import CALL_SECONDS, Runtime, RuntimeClient
from agent.cri.models import CriContainer, Sandbox
from agent.cri.sandboxes import Sandboxes
from agent.pods.changes import Subscription
from tests import polling


class Watched(Subscription):
    """Sandboxes, and all changes of them so far, as name and sandbox id.

    "removed" is the last sandbox of a pod that has none any more.
    """

    def __init__(self, sandboxes: Sandboxes) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.sandboxes = sandboxes
        self._sandboxes: dict[str, Sandbox] = {}
        self._containers: dict[str, tuple[CriContainer, ...]] = {}
        sandboxes.changes.subscribe(self)

    def mark(self, uid: str) -> None:
        super().mark(uid)
        before, now = self._sandboxes.pop(uid, None), self.sandboxes.current.get(uid)
        containers_before = self._containers.pop(uid, ())
        if now is None:
            if before:
                self.note("removed", before)
            return
        self._sandboxes[uid] = now
        self._containers[uid] = self.sandboxes.containers.get(uid, ())
        if now != before:
            self.note("sandbox", now)
        if self._containers[uid] != containers_before:
            self.note("containers", now)

    def note(self, change: str, sandbox: Sandbox) -> None:
        self.calls.append((change, sandbox.id))

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        """Fails with `what` and the changes if it does not hold in time."""
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

    watched = Watched(Sandboxes(open_wrapped, sandbox_netns.locate))
    running = asyncio.create_task(watched.sandboxes.run())
    try:
        yield watched
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
