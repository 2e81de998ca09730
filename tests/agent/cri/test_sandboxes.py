"""How often the sandboxes of a runtime are listed."""

import asyncio
import collections
import contextlib
import datetime
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from agent.cri.client import CriError, CriStuckError, CriUnimplementedError
from agent.cri.models import (
    CriContainer,
    CriContainerState,
    NetworkedSandbox,
    Sandbox,
    SandboxDetails,
)
from agent.cri.sandboxes import Sandboxes

pytestmark = pytest.mark.looptime

BORN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


async def unused(*_: object) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("has_events", "problem", "seconds"),
    [(False, "", 1), (True, "", 10), (True, "it does not respond", 1)],
)
async def test_lists_of_a_runtime_that_sends_events_are_rare(
    monkeypatch: pytest.MonkeyPatch, has_events: bool, problem: str, seconds: float
) -> None:
    monkeypatch.setattr(Sandboxes, "has_events", has_events)
    sandboxes = Sandboxes(unused, unused)
    sandboxes.problem = problem
    now = asyncio.get_running_loop().time
    before = now()
    await sandboxes._wait()
    assert now() - before == pytest.approx(seconds, abs=0.01)


async def test_hint_is_followed_at_once_but_not_more_than_ten_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sandboxes, "has_events", True)
    sandboxes = Sandboxes(unused, unused)
    sandboxes.problem = ""
    now = asyncio.get_running_loop().time
    before = now()
    asyncio.get_running_loop().call_later(3, sandboxes.hint)
    await sandboxes._wait()
    assert now() - before == pytest.approx(3, abs=0.01)
    before = now()
    sandboxes._echoes.clear()
    sandboxes.hint()
    await sandboxes._wait()
    assert now() - before == pytest.approx(0.1, abs=0.01)


async def test_runtime_that_cannot_be_reached_is_tried_at_intervals_while_a_pod_is_awaited() -> (
    None
):
    attempts = 0

    async def fail() -> Any:
        nonlocal attempts
        attempts += 1
        raise CriError("no such file")

    sandboxes = Sandboxes(fail, unused, is_awaited=lambda: True)
    task = asyncio.create_task(sandboxes.run())
    sandboxes.hint()
    await asyncio.sleep(10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Once a second, and after the hint and its echoes.
    assert 10 <= attempts <= 15


class Runtime:
    """Lists sandboxes of the host's network, each time for a while."""

    def __init__(self, list_seconds: float = 0.0) -> None:
        self.list_seconds = list_seconds
        self.sandboxes: list[Sandbox] = []
        self.containers: list[CriContainer] = []
        self.error: CriError | None = None
        self.listed_at: list[float] = []
        self.opened = 0
        self.closed = 0

    async def list_sandboxes(self) -> list[Sandbox]:
        self.listed_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.list_seconds)
        if self.error:
            raise self.error
        return list(self.sandboxes)

    async def list_containers(self) -> list[CriContainer]:
        return list(self.containers)

    async def sandbox_details(self, sandbox_id: str) -> SandboxDetails:
        return SandboxDetails(host_network=True, ips=(), info={})

    async def container_started(self, container_id: str) -> datetime.datetime:
        return BORN

    async def events(self) -> AsyncGenerator[str, None]:
        await asyncio.Event().wait()
        yield ""

    def networked_sandboxes(
        self, is_added: Callable[[str], bool]
    ) -> AsyncGenerator[NetworkedSandbox, None]:
        raise CriUnimplementedError("it has no such events.")

    async def aclose(self) -> None:
        self.closed += 1

    @property
    def usual_seconds(self) -> float:
        """From one list to the next, mostly."""
        gaps = [round(b - a, 2) for a, b in itertools.pairwise(self.listed_at)]
        return collections.Counter(gaps).most_common(1)[0][0]

    async def open(self) -> "Runtime":
        self.opened += 1
        return self

    @contextlib.asynccontextmanager
    async def followed(self, **options: Any) -> AsyncIterator[Sandboxes]:
        """For five seconds at first."""
        sandboxes = Sandboxes(self.open, unused, **options)
        running = asyncio.create_task(sandboxes.run())
        await asyncio.sleep(5)
        self.listed_at.clear()
        try:
            yield sandboxes
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("list_seconds", "hinted_at", "listed_at"),
    [
        (0.0, 0.11, [0.0, 0.1, 0.2]),
        (0.03, 0.17, [0.0, 0.13, 0.26]),
        (0.08, 0.27, [0.0, 0.18, 0.42]),
        (0.2, 0.51, [0.0, 0.3, 0.75]),
    ],
)
async def test_gap_after_a_list_depends_on_how_long_it_took(
    list_seconds: float, hinted_at: float, listed_at: list[float]
) -> None:
    """The second list is the echo of the first hint."""
    runtime = Runtime(list_seconds)
    async with runtime.followed() as sandboxes:
        started = asyncio.get_running_loop().time()
        sandboxes.hint()
        await asyncio.sleep(hinted_at)
        sandboxes.hint()
        await asyncio.sleep(0.3)
    assert [round(at - started, 2) for at in runtime.listed_at[:3]] == listed_at


@pytest.mark.parametrize(("list_seconds", "usual"), [(0.0, 0.01), (0.01, 0.05), (0.1, 0.2)])
async def test_runtime_is_listed_a_fifth_of_the_time_for_an_awaited_sandbox(
    list_seconds: float, usual: float
) -> None:
    runtime = Runtime(list_seconds)
    async with runtime.followed(is_awaited=lambda: True) as sandboxes:
        sandboxes.hint()
        await asyncio.sleep(2.9)
        assert runtime.usual_seconds == usual
        # Until three seconds after the hint.
        await asyncio.sleep(1)
        runtime.listed_at.clear()
        await asyncio.sleep(5)
        assert len(runtime.listed_at) <= 1


async def test_sandboxes_are_complete_after_two_lists() -> None:
    sandboxes = Sandboxes(Runtime().open, unused)
    found = [(sandboxes.relists, sandboxes.is_complete)]
    for _ in range(2):
        sandboxes.problem = ""
        await sandboxes.relist()
        found.append((sandboxes.relists, sandboxes.is_complete))
    assert found == [(0, False), (1, False), (2, True)]


async def test_second_list_follows_the_first_at_once() -> None:
    sandboxes = Sandboxes(Runtime().open, unused)
    running = asyncio.create_task(sandboxes.run())
    await asyncio.sleep(0.2)
    assert sandboxes.is_complete
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_sandboxes_of_a_runtime_that_is_away_are_not_complete() -> None:
    runtime = Runtime()
    async with runtime.followed() as sandboxes:
        assert (sandboxes.is_settled, sandboxes.is_complete, sandboxes.problem) == (True, True, "")
        assert sandboxes.listed.is_set()
        runtime.error = CriError("it is away.")
        sandboxes.hint()
        await asyncio.sleep(1)
        assert (sandboxes.is_settled, sandboxes.is_complete) == (False, False)
        assert sandboxes.problem == "it is away."
        runtime.error = None
        await asyncio.sleep(1.1)
        assert (sandboxes.is_complete, sandboxes.problem) == (True, "")


async def test_connection_ends_with_the_follower_which_connects_again() -> None:
    runtime = Runtime()
    async with runtime.followed() as sandboxes:
        assert (runtime.opened, runtime.closed) == (1, 0)
    assert (runtime.opened, runtime.closed) == (1, 1)
    await sandboxes.relist()
    assert (runtime.opened, runtime.closed) == (2, 1)


async def test_runtime_is_stuck_after_two_calls_that_do_not_end() -> None:
    runtime = Runtime()
    async with runtime.followed() as sandboxes:
        runtime.error = CriStuckError("it ended no call.")
        sandboxes.hint()
        await asyncio.sleep(0.05)
        assert (len(runtime.listed_at), sandboxes.is_stuck) == (1, False)
        await asyncio.sleep(0.1)
        assert (len(runtime.listed_at), sandboxes.is_stuck) == (2, True)
        runtime.error = None
        await asyncio.sleep(1)
        assert not sandboxes.is_stuck


def sandbox(uid: str, attempt: int = 0, *, is_ready: bool = True) -> Sandbox:
    return Sandbox(
        id=f"{uid}-{attempt}",
        pod_uid=uid,
        pod_name=uid,
        pod_namespace="shop",
        attempt=attempt,
        created=BORN,
        is_ready=is_ready,
    )


async def test_ready_sandbox_with_the_highest_attempt_is_current() -> None:
    runtime = Runtime()
    made = [sandbox("a"), sandbox("a", 1), sandbox("a", 2), sandbox("a", 3, is_ready=False)]
    for order in itertools.permutations(made):
        runtime.sandboxes = list(order)
        sandboxes = Sandboxes(runtime.open, unused)
        await sandboxes.relist()
        assert [one.id for one in sandboxes.current.values()] == ["a-2"]


def container(uid: str, name: str, attempt: int = 0) -> CriContainer:
    return CriContainer(
        id=f"{uid}-{name}-{attempt}",
        sandbox_id=f"{uid}-0",
        name=name,
        attempt=attempt,
        state=CriContainerState.RUNNING,
        created=BORN + datetime.timedelta(seconds=attempt),
    )


async def test_changes_are_of_the_pods_that_differ() -> None:
    runtime = Runtime()
    sandboxes = Sandboxes(runtime.open, unused)
    changes = sandboxes.changes.subscribe()

    async def changed() -> set[str]:
        await sandboxes.relist()
        return set(changes.take())

    runtime.sandboxes = [sandbox("a"), sandbox("b")]
    assert await changed() == {"a", "b"}
    assert await changed() == set()
    # Without a time of creation, one counts as the oldest.
    timeless = msgspec.structs.replace(container("a", "web", 5), created=None)
    found = [container("a", "web", 1), container("a", "web"), timeless, container("a", "side")]
    runtime.containers = found
    assert await changed() == {"a"}
    assert sandboxes.containers == {
        "a": tuple(
            msgspec.structs.replace(one, started=BORN)
            for one in (container("a", "side"), container("a", "web", 1))
        ),
        "b": (),
    }
    assert await changed() == set()
    runtime.containers[0] = msgspec.structs.replace(
        container("a", "web", 1), state=CriContainerState.EXITED
    )
    assert await changed() == {"a"}
    del runtime.sandboxes[0]
    assert await changed() == {"a"}
    assert (list(sandboxes.current), list(sandboxes.containers)) == (["b"], ["b"])
    runtime.sandboxes = [msgspec.structs.replace(sandbox("b"), is_ready=False)]
    assert await changed() == {"b"}
    assert (sandboxes.current, sandboxes.containers) == ({}, {})
    assert await changed() == set()
