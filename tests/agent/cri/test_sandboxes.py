"""How often the sandboxes of a runtime are listed."""

import asyncio
import collections
import contextlib
import itertools
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import structlog.testing

from agent.cri.client import CriError, CriStuckError
from agent.cri.models import CriContainerState
from agent.cri.sandboxes import Sandboxes
from agent.logs import Event
from tests.agent.cri.memory_runtime import MemoryRuntime, now

pytestmark = pytest.mark.looptime


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
    before = now()
    await sandboxes._wait()
    assert now() - before == pytest.approx(seconds, abs=0.01)


async def test_hint_is_followed_at_once_but_not_more_than_ten_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sandboxes, "has_events", True)
    sandboxes = Sandboxes(unused, unused)
    sandboxes.problem = ""
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


@pytest.fixture
def runtime(tmp_path: pathlib.Path) -> MemoryRuntime:
    return MemoryRuntime(tmp_path)


@contextlib.asynccontextmanager
async def followed(runtime: MemoryRuntime, **options: Any) -> AsyncIterator[Sandboxes]:
    """For five seconds at first."""
    sandboxes = Sandboxes(runtime.open, runtime.locate, **options)
    running = asyncio.create_task(sandboxes.run())
    await asyncio.sleep(5)
    runtime.lists.clear()
    try:
        yield sandboxes
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def most_common_gap(runtime: MemoryRuntime) -> float:
    """Seconds from one list to the next."""
    gaps = [round(after - before, 2) for before, after in itertools.pairwise(runtime.lists)]
    return collections.Counter(gaps).most_common(1)[0][0]


@pytest.mark.parametrize(
    ("list_seconds", "hinted_at", "listed_at"),
    [
        (0.0, 0.11, [0.0, 0.1, 0.2]),
        (0.03, 0.17, [0.0, 0.13, 0.26]),
        (0.08, 0.33, [0.0, 0.24, 0.48]),
        (0.2, 0.66, [0.0, 0.45, 0.9]),
    ],
)
async def test_gap_after_a_list_depends_on_how_long_it_took(
    runtime: MemoryRuntime, list_seconds: float, hinted_at: float, listed_at: list[float]
) -> None:
    """The second list is the echo of the first hint."""
    runtime.list_seconds = list_seconds
    async with followed(runtime) as sandboxes:
        started = now()
        sandboxes.hint()
        await asyncio.sleep(hinted_at)
        sandboxes.hint()
        await asyncio.sleep(0.3)
    assert [round(at - started, 2) for at in runtime.lists[:3]] == listed_at


@pytest.mark.parametrize(("list_seconds", "usual"), [(0.0, 0.1), (0.08, 0.24), (0.2, 0.45)])
async def test_sustained_hints_cause_one_list_per_gap(
    runtime: MemoryRuntime, list_seconds: float, usual: float
) -> None:
    runtime.list_seconds = list_seconds
    async with followed(runtime) as sandboxes:
        for _ in range(500):
            sandboxes.hint()
            await asyncio.sleep(0.01)
    assert most_common_gap(runtime) == usual


@pytest.mark.parametrize(("list_seconds", "usual"), [(0.0, 0.01), (0.01, 0.05), (0.1, 0.2)])
async def test_runtime_is_listed_a_fifth_of_the_time_for_an_awaited_sandbox(
    runtime: MemoryRuntime, list_seconds: float, usual: float
) -> None:
    runtime.list_seconds = list_seconds
    async with followed(runtime, is_awaited=lambda: True) as sandboxes:
        sandboxes.hint()
        await asyncio.sleep(2.9)
        assert most_common_gap(runtime) == usual
        # Until three seconds after the hint.
        await asyncio.sleep(1)
        runtime.lists.clear()
        await asyncio.sleep(5)
        assert len(runtime.lists) <= 1


async def test_sandboxes_are_complete_after_two_lists(runtime: MemoryRuntime) -> None:
    sandboxes = Sandboxes(runtime.open, runtime.locate)
    found = [(sandboxes.relists, sandboxes.is_complete)]
    for _ in range(2):
        sandboxes.problem = ""
        await sandboxes.relist()
        found.append((sandboxes.relists, sandboxes.is_complete))
    assert found == [(0, False), (1, False), (2, True)]


async def test_second_list_follows_the_first_at_once(runtime: MemoryRuntime) -> None:
    sandboxes = Sandboxes(runtime.open, runtime.locate)
    running = asyncio.create_task(sandboxes.run())
    await asyncio.sleep(0.2)
    assert sandboxes.is_complete
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_sandboxes_of_a_runtime_that_is_away_are_not_complete(runtime: MemoryRuntime) -> None:
    async with followed(runtime) as sandboxes:
        assert (sandboxes.is_settled, sandboxes.is_complete, sandboxes.problem) == (True, True, "")
        assert sandboxes.listed.is_set()
        runtime.failure = CriError("it is away.")
        sandboxes.hint()
        await asyncio.sleep(1)
        assert (sandboxes.is_settled, sandboxes.is_complete) == (False, False)
        assert sandboxes.problem == "it is away."
        runtime.failure = None
        await asyncio.sleep(1.1)
        assert (sandboxes.is_complete, sandboxes.problem) == (True, "")


async def test_connection_ends_with_the_follower_which_connects_again(
    runtime: MemoryRuntime,
) -> None:
    async with followed(runtime) as sandboxes:
        assert (runtime.opened, runtime.closed) == (1, 0)
    assert (runtime.opened, runtime.closed) == (1, 1)
    await sandboxes.relist()
    assert (runtime.opened, runtime.closed) == (2, 1)


async def test_runtime_is_stuck_after_two_calls_that_do_not_end(runtime: MemoryRuntime) -> None:
    async with followed(runtime) as sandboxes:
        runtime.failure = CriStuckError("it ended no call.")
        sandboxes.hint()
        await asyncio.sleep(0.05)
        assert (len(runtime.lists), sandboxes.is_stuck) == (1, False)
        await asyncio.sleep(0.1)
        assert (len(runtime.lists), sandboxes.is_stuck) == (2, True)
        runtime.failure = None
        await asyncio.sleep(1)
        assert not sandboxes.is_stuck


async def test_ready_sandbox_with_the_highest_attempt_is_current(runtime: MemoryRuntime) -> None:
    for attempt in range(4):
        runtime.run("a", attempt)
    runtime.give_up("a-3")
    for order in itertools.permutations(runtime.sandboxes.items()):
        runtime.sandboxes = dict(order)
        sandboxes = Sandboxes(runtime.open, runtime.locate)
        await sandboxes.relist()
        assert [one.id for one in sandboxes.current.values()] == ["a-2"]


async def test_changes_are_of_the_pods_that_differ(runtime: MemoryRuntime) -> None:
    sandboxes = Sandboxes(runtime.open, runtime.locate)
    changes = sandboxes.changes.subscribe()

    async def changed() -> set[str]:
        await sandboxes.relist()
        return set(changes.take())

    runtime.run("a")
    runtime.run("b")
    assert await changed() == {"a", "b"}
    assert await changed() == set()
    runtime.start("a-0", "web")
    newest = runtime.start("a-0", "web", 1)
    side = runtime.start("a-0", "side")
    # Without a time of creation, one counts as the oldest.
    timeless = runtime.start("a-0", "web", 5)
    runtime.containers[timeless.id] = msgspec.structs.replace(timeless, created=None)
    assert await changed() == {"a"}
    assert sandboxes.containers == {
        "a": tuple(msgspec.structs.replace(one, started=one.created) for one in (side, newest)),
        "b": (),
    }
    assert await changed() == set()
    runtime.containers[newest.id] = msgspec.structs.replace(newest, state=CriContainerState.EXITED)
    assert await changed() == {"a"}
    runtime.stop("a-0")
    del runtime.sandboxes["a-0"]
    assert await changed() == {"a"}
    assert (list(sandboxes.current), list(sandboxes.containers)) == (["b"], ["b"])
    runtime.stop("b-0")
    assert await changed() == {"b"}
    assert (sandboxes.current, sandboxes.containers) == ({}, {})
    assert await changed() == set()


async def test_log_has_each_change_of_a_sandbox_once(
    runtime: MemoryRuntime, tmp_path: pathlib.Path
) -> None:
    sandboxes = Sandboxes(runtime.open, runtime.locate)

    async def logged() -> list[tuple[str, Event, str]]:
        with structlog.testing.capture_logs() as logs:
            await sandboxes.relist()
            await sandboxes.relist()
        return [(one["log_level"], one["event"], one["sandbox"]) for one in logs]

    runtime.run("a")
    assert await logged() == [("info", Event.SANDBOX_FOUND, "a-0")]
    runtime.start("a-0", "web")
    assert await logged() == []
    runtime.give_up("a-0")
    assert await logged() == [("info", Event.SANDBOX_NOT_READY, "a-0")]
    runtime.run("a", 1)
    assert await logged() == [("info", Event.SANDBOX_FOUND, "a-1")]
    runtime.stop("a-1")
    (tmp_path / "a-0").unlink()
    assert await logged() == [("info", Event.SANDBOX_REMOVED, "a-1")]
    runtime.run("b")
    runtime.lost.add("b-0")
    assert await logged() == [("warning", Event.SANDBOX_NETNS_MISSING, "b-0")]
    runtime.lost.clear()
    await asyncio.sleep(2)
    assert await logged() == []
    assert sandboxes.current["b"].netns is not None


async def test_log_has_each_problem_of_the_runtime_once(runtime: MemoryRuntime) -> None:
    runtime.run("a")
    runtime.failure = CriError("it is away.")
    with structlog.testing.capture_logs() as logs:
        async with followed(runtime) as sandboxes:
            assert sandboxes.problem == "it is away."
            runtime.failure = CriError("it fails.")
            await asyncio.sleep(5)
            runtime.failure = None
            await asyncio.sleep(5)
            assert sandboxes.problem == ""
            runtime.failure = CriError("it is away.")
            sandboxes.hint()
            await asyncio.sleep(5)
    assert [
        (one["event"], one.get("problem", one.get("sandboxes")))
        for one in logs
        if one["event"] in (Event.RUNTIME_UNREACHABLE, Event.RUNTIME_REACHABLE)
    ] == [
        (Event.RUNTIME_UNREACHABLE, "it is away."),
        (Event.RUNTIME_UNREACHABLE, "it fails."),
        (Event.RUNTIME_REACHABLE, 1),
        (Event.RUNTIME_UNREACHABLE, "it is away."),
    ]


async def test_requests_that_run_end_with_the_follower(runtime: MemoryRuntime) -> None:
    runtime.run("stuck")
    runtime.slow.add("stuck-0")
    before = asyncio.all_tasks()
    async with followed(runtime) as sandboxes:
        assert not sandboxes.is_settled
        assert not sandboxes.listed.is_set()
    assert asyncio.all_tasks() == before
    assert sandboxes.is_settled
