"""When details of sandboxes and containers are requested, and what is used while they cannot be."""

import asyncio
import datetime
import math
from typing import Any

import msgspec
import pytest

from agent.cri.client import CriError, CriNotFoundError
from agent.cri.lookups import SandboxLookups
from agent.cri.models import CriContainer, CriContainerState, Sandbox, SandboxDetails
from agent.cri.sandbox_netns import SandboxNetns
from probes.netns import Netns

pytestmark = pytest.mark.looptime

NETNS = Netns("/proc/self/ns/net", 1, 2)
STARTED = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def sandbox(name: str, pod: str = "", *, attempt: int = 0, is_ready: bool = True) -> Sandbox:
    return Sandbox(
        id=name,
        pod_uid=pod or f"uid-{name}",
        pod_name="web",
        pod_namespace="shop",
        attempt=attempt,
        created=None,
        is_ready=is_ready,
    )


class Node:
    """A runtime whose answers the test sets, and the requests to it."""

    def __init__(self) -> None:
        self.error: CriError | None = None
        self.located = SandboxNetns(NETNS)
        self.started: datetime.datetime | None = STARTED
        self.host_network = False
        self.requested: list[str] = []
        self.lookups = SandboxLookups(self._locate, on_late=lambda: None)

    async def sandbox_details(self, sandbox_id: str) -> SandboxDetails:
        self.requested.append(sandbox_id)
        if self.error:
            raise self.error
        return SandboxDetails(host_network=self.host_network, ips=(), info={})

    async def container_started(self, container_id: str) -> datetime.datetime | None:
        self.requested.append(container_id)
        if self.error:
            raise self.error
        return self.started

    async def _locate(self, _: SandboxDetails) -> SandboxNetns:
        return self.located

    async def update(
        self, *listed: Sandbox, containers: tuple[CriContainer, ...] = ()
    ) -> list[str]:
        """What this update requests."""
        self.requested.clear()
        runtime: Any = self
        await self.lookups.update(runtime, list(listed), list(containers))
        return sorted(self.requested)


@pytest.fixture
def node() -> Node:
    return Node()


async def test_all_ready_sandboxes_and_the_last_of_other_pods_are_looked_up_once(
    node: Node,
) -> None:
    listed = [
        *(sandbox("a"), sandbox("old", "uid-a", is_ready=False)),
        *(sandbox("b1", "b", attempt=1, is_ready=False), sandbox("b0", "b", is_ready=False)),
    ]
    assert await node.update(*listed) == ["a", "b1"]
    found = node.lookups.sandbox("a")
    assert found == msgspec.structs.replace(listed[0], netns=NETNS)
    assert node.lookups.sandbox("b0") is None
    assert (node.lookups.has("a"), node.lookups.has("b0")) == (True, False)
    # The namespaces of these do not exist any more, which matters to those that are ready.
    assert await node.update(*listed) == ["a"]
    # It has stopped.
    stopped = sandbox("a", is_ready=False)
    assert await node.update(stopped) == ["a"]
    assert node.lookups.next_retry_at == math.inf


async def test_failed_lookups_are_repeated_with_back_off_and_keep_what_was_found(
    node: Node,
) -> None:
    ready = sandbox("a")
    node.error = CriError("It does not respond.")
    assert await node.update(ready) == ["a"]
    found = node.lookups.sandbox("a")
    assert found == msgspec.structs.replace(ready, problem="It does not respond.")
    for seconds in (0.5, 1.0, 2.0):
        now = asyncio.get_running_loop().time()
        assert node.lookups.next_retry_at == pytest.approx(now + seconds)
        assert await node.update(ready) == []
        await asyncio.sleep(seconds)
        assert await node.update(ready) == ["a"]
    await asyncio.sleep(4)
    node.error = None
    assert await node.update(ready) == ["a"]
    expected = msgspec.structs.replace(ready, netns=NETNS)
    assert node.lookups.sandbox("a") == expected
    # A namespace that was found stays while the runtime fails.
    node.error = CriError("It does not respond.")
    assert await node.update(ready) == ["a"]
    assert node.lookups.sandbox("a") == expected


async def test_sandbox_that_the_runtime_has_no_more_is_left_to_the_next_list(node: Node) -> None:
    node.error = CriNotFoundError("It is gone.")
    assert await node.update(sandbox("a")) == ["a"]
    assert node.lookups.sandbox("a") is None
    node.error = None
    assert await node.update(sandbox("a")) == ["a"]
    node.lookups.forget_others(set(), set())
    assert node.lookups.sandbox("a") is None


async def test_sandbox_without_a_namespace_has_a_problem_once_it_is_not_just_ending(
    node: Node,
) -> None:
    ready = sandbox("a")
    assert await node.update(ready) == ["a"]
    node.located = SandboxNetns(None, "It has none.")
    assert await node.update(ready) == ["a"]
    assert node.lookups.sandbox("a") == msgspec.structs.replace(ready, netns=NETNS)
    await asyncio.sleep(0.5)
    assert await node.update(ready) == ["a"]
    assert node.lookups.sandbox("a") == msgspec.structs.replace(ready, problem="It has none.")
    # Of one that has stopped it is expected.
    stopped = sandbox("b", is_ready=False)
    await node.update(stopped)
    await asyncio.sleep(100)
    assert await node.update(stopped) == []


async def test_namespace_of_a_pod_of_the_host_is_not_searched(node: Node) -> None:
    node.host_network = True
    node.located = SandboxNetns(None, "It has none.")
    await node.update(sandbox("a"))
    assert node.lookups.sandbox("a") == msgspec.structs.replace(sandbox("a"), host_network=True)
    assert node.lookups.next_retry_at == math.inf


def container(state: CriContainerState) -> tuple[CriContainer]:
    return (CriContainer(id="c", sandbox_id="a", name="app", attempt=0, state=state, created=None),)


async def test_start_of_a_container_is_requested_until_it_has_one(node: Node) -> None:
    created, running, exited = (
        container(state)
        for state in (
            CriContainerState.CREATED,
            CriContainerState.RUNNING,
            CriContainerState.EXITED,
        )
    )
    assert await node.update(containers=created) == []
    node.error = CriError("It does not respond.")
    assert await node.update(containers=running) == ["c"]
    node.error, node.started = None, None
    assert await node.update(containers=running) == ["c"]
    # It has none in this state.
    assert await node.update(containers=running) == []
    node.started = STARTED
    assert await node.update(containers=exited) == ["c"]
    assert node.lookups.started("c") == STARTED
    assert await node.update(containers=running) == []
    node.lookups.forget_others(set(), set())
    assert node.lookups.started("c") is None
