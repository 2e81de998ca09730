"""Sandboxes that the runtime reports before it lists them need no request of their own then."""

import asyncio
import contextlib
import ipaddress
import json
import os
import pathlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import pytest

from agent.cri.lookups import SandboxLookups
from agent.cri.models import NetworkedSandbox, Sandbox, SandboxDetails
from agent.cri.sandbox_netns import SandboxNetns
from agent.cri.sandboxes import Sandboxes
from probes.netns import Netns
from tests import blocking

IPS = (ipaddress.ip_address("198.18.1.1"),)


class Runtime:
    """Lists sandboxes, and counts requests for their details."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.listed: list[Sandbox] = []
        self.lists = 0
        self.requested: list[str] = []
        self.requests = 0
        """Of reported sandboxes that were not known."""
        self.networked: asyncio.Queue[NetworkedSandbox | None] = asyncio.Queue()
        self.folder = folder

    def sandbox(self, name: str, *, is_ready: bool = True) -> Sandbox:
        return Sandbox(
            id=name,
            pod_uid=f"uid-{name}",
            pod_name=name,
            pod_namespace="shop",
            attempt=0,
            created=None,
            is_ready=is_ready,
        )

    def report(self, name: str) -> None:
        """As soon as it has its network."""
        sandbox = self.sandbox(name, is_ready=False)
        self.networked.put_nowait(
            NetworkedSandbox(msgspec.structs.replace(sandbox, ips=IPS), str(self.folder / name))
        )

    async def locate(self, details: SandboxDetails) -> SandboxNetns:
        (text,) = details.info.values()
        return SandboxNetns(_netns(json.loads(text)["sandboxMetadata"]["NetNSPath"]))

    async def list_sandboxes(self) -> list[Sandbox]:
        self.lists += 1
        return list(self.listed)

    async def list_containers(self) -> list[Any]:
        return []

    async def sandbox_details(self, sandbox_id: str) -> SandboxDetails:
        self.requested.append(sandbox_id)
        info = {"": json.dumps({"sandboxMetadata": {"NetNSPath": str(self.folder / sandbox_id)}})}
        return SandboxDetails(host_network=False, ips=IPS, info=info)

    async def events(self) -> AsyncGenerator[str, None]:
        await asyncio.Event().wait()
        yield ""

    async def networked_sandboxes(
        self, is_added: Callable[[str], bool]
    ) -> AsyncGenerator[NetworkedSandbox, None]:
        while found := await self.networked.get():
            if not is_added(found.sandbox.id):
                self.requests += 1
                yield found

    async def aclose(self) -> None: ...


@blocking.may_block("a file takes a namespace's place")
def _netns(path: str) -> Netns:
    pathlib.Path(path).touch()
    status = os.stat(path)
    return Netns(path, status.st_dev, status.st_ino)


@pytest.fixture
def runtime(tmp_path: pathlib.Path) -> Runtime:
    return Runtime(tmp_path)


@contextlib.asynccontextmanager
async def followed(runtime: Runtime, **options: Any) -> AsyncGenerator[Sandboxes, None]:
    async def open_runtime() -> Any:
        return runtime

    sandboxes = Sandboxes(open_runtime, runtime.locate, **options)
    changes = sandboxes.changes.subscribe()
    task = asyncio.create_task(sandboxes.run())
    try:
        async with asyncio.timeout(60):
            await sandboxes.listed.wait()
            changes.take()
            yield sandboxes
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _changed(sandboxes: Sandboxes) -> None:
    changes = sandboxes.changes.subscribe()
    await changes.next()
    sandboxes.changes.unsubscribe(changes)


@pytest.mark.looptime
async def test_reported_sandbox_is_listed_without_a_request(runtime: Runtime) -> None:
    async with followed(runtime) as sandboxes:
        runtime.report("web")
        await _changed(sandboxes)
        assert not sandboxes.current["uid-web"].is_ready
        runtime.listed = [runtime.sandbox("web"), runtime.sandbox("other")]
        sandboxes.hint()
        await _changed(sandboxes)
        web, other = sandboxes.current["uid-web"], sandboxes.current["uid-other"]
        assert web.is_ready
        assert (web.ips, web.netns and web.netns.path) == (IPS, str(runtime.folder / "web"))
        assert other.ips == IPS
        assert runtime.requested == ["other"]


@pytest.mark.looptime
async def test_added_sandbox_replaces_a_ready_one_only_if_the_runtime_starts_it(
    runtime: Runtime,
) -> None:
    listed = runtime.sandbox("web")
    runtime.listed = [listed]
    second = msgspec.structs.replace(listed, id="web-again", attempt=7, ips=IPS)
    path = str(runtime.folder / "web-again")
    async with followed(runtime) as sandboxes:
        changes = sandboxes.changes.subscribe()
        await sandboxes.add(NetworkedSandbox(second, path))
        # It is listed already.
        await sandboxes.add(NetworkedSandbox(listed, path), is_started=True)
        assert (sandboxes.current["uid-web"].id, changes.take()) == ("web", [])
        await sandboxes.add(NetworkedSandbox(second, path), is_started=True)
        found = sandboxes.current["uid-web"]
        assert found == msgspec.structs.replace(
            second, attempt=1, is_ready=False, created=found.created, netns=found.netns
        )
        assert (found.netns and found.netns.path, found.created is None) == (path, False)
        assert (sandboxes.containers["uid-web"], changes.take()) == ((), ["uid-web"])
        await sandboxes.add(NetworkedSandbox(second, path), is_started=True)
        assert changes.take() == []


@pytest.mark.looptime
async def test_added_sandbox_of_a_new_pod_is_its_first(runtime: Runtime) -> None:
    async with followed(runtime) as sandboxes:
        added = msgspec.structs.replace(runtime.sandbox("web"), attempt=7, ips=IPS)
        await sandboxes.add(NetworkedSandbox(added, str(runtime.folder / "web")))
        found = sandboxes.current["uid-web"]
        assert (found.id, found.attempt, found.is_ready) == ("web", 0, False)


@pytest.mark.looptime
async def test_update_of_an_added_sandbox_causes_no_request(runtime: Runtime) -> None:
    async with followed(runtime) as sandboxes:
        runtime.report("web")
        await _changed(sandboxes)
        runtime.report("web")
        runtime.listed = [runtime.sandbox("web")]
        sandboxes.hint()
        await _changed(sandboxes)
        runtime.report("web")
        runtime.report("other")
        await _changed(sandboxes)
        assert runtime.requests == 2


@pytest.mark.looptime
async def test_sandbox_whose_namespace_is_gone_when_it_is_listed_is_requested(
    runtime: Runtime,
) -> None:
    lookups = SandboxLookups(runtime.locate, on_late=lambda: None)
    path = runtime.folder / "web"
    lookups.add(msgspec.structs.replace(runtime.sandbox("web"), ips=IPS, netns=_netns(str(path))))
    path.unlink()
    await lookups.update(runtime, [runtime.sandbox("web")], [])  # type: ignore[arg-type]
    assert runtime.requested == ["web"]


@pytest.mark.looptime
async def test_runtime_that_reports_sandboxes_is_not_polled_for_awaited_ones(
    runtime: Runtime,
) -> None:
    async with followed(runtime, is_awaited=lambda: True) as sandboxes:
        sandboxes.hint()
        await asyncio.sleep(1)
        assert runtime.lists > 20
        runtime.report("web")
        await asyncio.sleep(1)
        runtime.lists = 0
        sandboxes.hint()
        await asyncio.sleep(1)
        # The hint and its echoes.
        assert 1 <= runtime.lists <= 4
        # Once it has stopped to report them, it is polled again.
        runtime.networked.put_nowait(None)
        await asyncio.sleep(1)
        runtime.lists = 0
        sandboxes.hint()
        await asyncio.sleep(1)
        assert runtime.lists > 5
