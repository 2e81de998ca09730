"""A container runtime in memory, for tests in fake time."""

import asyncio
import datetime
import json
import pathlib
from collections.abc import AsyncGenerator, Callable

import msgspec

from agent.cri.client import CriError, CriNotFoundError, CriUnimplementedError
from agent.cri.models import (
    CriContainer,
    CriContainerState,
    NetworkedSandbox,
    Sandbox,
    SandboxDetails,
)
from agent.cri.sandbox_netns import SandboxNetns
from probes.netns import Netns
from tests.blocking import may_block

BORN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

_DETAILS = SandboxDetails(host_network=False, ips=(), info={})


def now() -> float:
    """Seconds by the event loop's clock."""
    return round(asyncio.get_running_loop().time(), 3)


class MemoryRuntime:
    """Its namespaces are files, which exist or not."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self.sandboxes: dict[str, Sandbox] = {}
        self.containers: dict[str, CriContainer] = {}
        self.failure: CriError | None = None
        self.stream_failure: CriError | None = None
        self.streams: list[asyncio.Queue[str | None]] = []
        self.slow: set[str] = set()
        self.broken: set[str] = set()
        self.lost: set[str] = set()
        self.unreadable: set[str] = set()
        self.list_seconds = 0.0
        self.lists: list[float] = []
        self.looks: list[tuple[float, str]] = []
        self.opened = 0
        self.closed = 0

    async def open(self) -> "MemoryRuntime":
        self.opened += 1
        return self

    def run(self, uid: str, attempt: int = 0, *, name: str | None = None) -> Sandbox:
        sandbox = Sandbox(
            id=name or f"{uid}-{attempt}",
            pod_uid=uid,
            pod_name=uid,
            pod_namespace="tests",
            attempt=attempt,
            created=BORN + datetime.timedelta(seconds=attempt),
            is_ready=True,
        )
        self.sandboxes[sandbox.id] = sandbox
        (self._directory / sandbox.id).touch()
        return sandbox

    def give_up(self, sandbox_id: str) -> None:
        """It is not ready any more, and its namespace still exists."""
        sandbox = self.sandboxes[sandbox_id]
        self.sandboxes[sandbox_id] = msgspec.structs.replace(sandbox, is_ready=False)

    def stop(self, sandbox_id: str) -> None:
        self.give_up(sandbox_id)
        (self._directory / sandbox_id).unlink()

    def start(self, sandbox_id: str, name: str = "app", attempt: int = 0) -> CriContainer:
        container = CriContainer(
            id=f"{sandbox_id}-{name}-{attempt}",
            sandbox_id=sandbox_id,
            name=name,
            attempt=attempt,
            state=CriContainerState.RUNNING,
            created=BORN + datetime.timedelta(seconds=attempt),
        )
        self.containers[container.id] = container
        return container

    def send(self, event: str | None) -> None:
        """An event to each listener; None cuts their streams."""
        for stream in self.streams:
            stream.put_nowait(event)

    @may_block("two looks at a file of the test's own; threads know nothing of fake time")
    async def locate(self, details: SandboxDetails) -> SandboxNetns:
        # By the id of one that is listed, or the path of one that was added.
        name = (
            details.info.get("id") or json.loads(details.info[""])["sandboxMetadata"]["NetNSPath"]
        )
        path = self._directory / name
        if name in self.lost or not path.exists():
            return SandboxNetns(None, "It is nowhere.", is_unknown=name in self.unreadable)
        status = path.stat()
        return SandboxNetns(Netns(str(path), status.st_dev, status.st_ino))

    async def list_sandboxes(self) -> list[Sandbox]:
        self.lists.append(now())
        await asyncio.sleep(self.list_seconds)
        if self.failure:
            raise self.failure
        return list(self.sandboxes.values())

    async def list_containers(self) -> list[CriContainer]:
        return list(self.containers.values())

    async def sandbox_details(self, sandbox_id: str) -> SandboxDetails:
        self.looks.append((now(), sandbox_id))
        if sandbox_id in self.slow:
            await asyncio.sleep(10)
            raise CriError("it hangs.")
        if sandbox_id in self.broken:
            raise CriError("it is broken.")
        if sandbox_id not in self.sandboxes:
            raise CriNotFoundError("it is gone.")
        return msgspec.structs.replace(_DETAILS, info={"id": sandbox_id})

    async def container_started(self, container_id: str) -> datetime.datetime | None:
        return self.containers[container_id].created

    async def events(self) -> AsyncGenerator[str, None]:
        if self.stream_failure:
            raise self.stream_failure
        stream: asyncio.Queue[str | None] = asyncio.Queue()
        self.streams.append(stream)
        try:
            while event := await stream.get():
                yield event
        finally:
            self.streams.remove(stream)

    def networked_sandboxes(
        self, is_added: Callable[[str], bool]
    ) -> AsyncGenerator[NetworkedSandbox, None]:
        raise CriUnimplementedError("it has no events of its own.")

    async def aclose(self) -> None:
        self.closed += 1
