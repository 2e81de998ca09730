"""Following a runtime: lists, hints, failures; in fake time."""

import asyncio
import contextlib
import datetime
import itertools
import pathlib
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
import pytest

from agent.cri.client import CriError, CriStuckError, CriUnimplementedError
from agent.cri.models import NetworkedSandbox, Sandbox
from agent.cri.sandboxes import Sandboxes
from tests.agent.cri.memory_runtime import BORN, MemoryRuntime, now
from tests.runtime.watching import Watched

pytestmark = pytest.mark.looptime

_AWAY = CriError("it is away.")


class _Following(Watched):
    """`Sandboxes` and when they changed: seconds of each change in `calls`."""

    def __init__(self, runtime: MemoryRuntime) -> None:
        self.times: list[float] = []
        self.is_awaited = False
        """Whether a pod of the node has no sandbox yet."""
        super().__init__(
            Sandboxes(runtime.open, runtime.locate, is_awaited=lambda: self.is_awaited)
        )

    @property
    def current(self) -> dict[str, Sandbox]:
        return self.sandboxes.current

    def when(self, word: str, sandbox_id: str) -> float | None:
        calls = zip(self.times, self.calls, strict=True)
        return next((time for time, call in calls if call == (word, sandbox_id)), None)

    def note(self, change: str, sandbox: Sandbox) -> None:
        super().note(change, sandbox)
        self.times.append(now())


@pytest.fixture
def runtime(tmp_path: pathlib.Path) -> MemoryRuntime:
    return MemoryRuntime(tmp_path)


@contextlib.asynccontextmanager
async def _following(
    runtime: MemoryRuntime, settle_seconds: float = 5
) -> AsyncIterator[_Following]:
    """A follower that runs, and had time to find its events and be quiet again."""
    calls = _Following(runtime)
    running = asyncio.create_task(calls.sandboxes.run())
    await asyncio.sleep(settle_seconds)
    try:
        yield calls
    finally:
        assert not running.done()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_namespace_that_could_not_be_read_is_looked_up_again_before_the_next_list(
    runtime: MemoryRuntime,
) -> None:
    async with _following(runtime) as calls:
        runtime.lost.add("a-0")
        runtime.run("a")
        runtime.send("/tasks/start")
        await asyncio.sleep(1.2)
        assert calls.current["a"].netns is None
        runtime.lost.clear()
        await asyncio.sleep(2)
        assert calls.current["a"].netns is not None


async def test_namespace_that_could_not_be_read_for_long_is_found_soon_after(
    runtime: MemoryRuntime,
) -> None:
    runtime.run("a")
    runtime.lost.add("a-0")
    runtime.unreadable.add("a-0")
    async with _following(runtime, 300) as calls:
        runtime.lost.clear()
        await asyncio.sleep(2)
        assert calls.current["a"].netns is not None


async def test_grpc_that_ends_no_call_is_a_reason_to_start_the_agent_again(
    runtime: MemoryRuntime,
) -> None:
    async with _following(runtime) as calls:
        runtime.failure = CriStuckError("it ended no call.")
        await asyncio.sleep(12)
        assert calls.sandboxes.is_stuck
        assert calls.sandboxes.problem == "it ended no call."
        runtime.failure = _AWAY
        await asyncio.sleep(12)
        runtime.failure = None
        await asyncio.sleep(12)
        assert not calls.sandboxes.is_stuck


async def test_event_triggers_a_list_at_once(runtime: MemoryRuntime) -> None:
    async with _following(runtime) as calls:
        runtime.run("a")
        before = now()
        runtime.send("/tasks/start")
        await asyncio.sleep(1)
        assert calls.when("sandbox", "a-0") == before


async def test_sandbox_listed_after_its_event_is_found_soon(runtime: MemoryRuntime) -> None:
    async with _following(runtime) as calls:
        before = now()
        runtime.send("/tasks/start")
        await asyncio.sleep(0.3)
        runtime.run("a")
        await asyncio.sleep(1)
        assert (calls.when("sandbox", "a-0") or 99) - before <= 0.6


def _added(runtime: MemoryRuntime, uid: str, attempt: int = 0) -> Sandbox:
    """A sandbox that has its network, and that the runtime does not list yet."""
    sandbox = runtime.run(uid, attempt)
    del runtime.sandboxes[sandbox.id]
    return msgspec.structs.replace(sandbox, attempt=0, created=None, is_ready=False)


async def test_added_sandbox_is_current_before_and_after_it_is_listed(
    runtime: MemoryRuntime,
) -> None:
    async with _following(runtime) as calls:
        sandbox = _added(runtime, "a")
        await calls.sandboxes.add(NetworkedSandbox(sandbox, sandbox.id))
        assert calls.current["a"].id == "a-0"
        assert calls.current["a"].netns is not None
        calls.sandboxes.hint()
        await asyncio.sleep(5)
        assert calls.calls == [("sandbox", "a-0")]
        runtime.run("a")
        calls.sandboxes.hint()
        await asyncio.sleep(5)
        assert calls.current["a"].is_ready
        assert {what for what, _ in calls.calls} == {"sandbox"}


async def test_sandbox_that_is_listed_longer_does_not_replace_an_added_one(
    runtime: MemoryRuntime,
) -> None:
    async with _following(runtime) as calls:
        runtime.run("a", attempt=7)
        calls.sandboxes.hint()
        await asyncio.sleep(5)
        runtime.give_up("a-7")
        calls.sandboxes.hint()
        await asyncio.sleep(5)
        sandbox = _added(runtime, "a", attempt=8)
        await calls.sandboxes.add(NetworkedSandbox(sandbox, sandbox.id))
        calls.sandboxes.hint()
        await asyncio.sleep(5)
        assert calls.current["a"].id == "a-8"


async def test_added_sandbox_goes_with_its_namespace(runtime: MemoryRuntime) -> None:
    """As after a failure of another plugin: the runtime never lists it."""
    async with _following(runtime) as calls:
        sandbox = _added(runtime, "a")
        await calls.sandboxes.add(NetworkedSandbox(sandbox, sandbox.id))
        runtime.run("a")
        runtime.stop("a-0")
        del runtime.sandboxes["a-0"]
        calls.sandboxes.hint()
        await asyncio.sleep(5)
        assert calls.current == {}


async def test_ready_sandbox_is_not_replaced_by_an_added_one(runtime: MemoryRuntime) -> None:
    async with _following(runtime) as calls:
        runtime.run("a")
        calls.sandboxes.hint()
        await asyncio.sleep(5)
        for uid_attempt in (0, 1):
            sandbox = _added(runtime, "a", uid_attempt)
            await calls.sandboxes.add(NetworkedSandbox(sandbox, sandbox.id))
        assert calls.current["a"].id == "a-0"
        assert calls.current["a"].is_ready


async def test_added_sandbox_without_its_addresses_is_left_to_the_list(
    runtime: MemoryRuntime,
) -> None:
    async with _following(runtime) as calls:
        sandbox = _added(runtime, "a")
        runtime.lost.add(sandbox.id)
        await calls.sandboxes.add(NetworkedSandbox(sandbox, sandbox.id))
        assert calls.current == {}


@pytest.mark.parametrize("delay", [0.013, 0.237, 0.9, 2.5])
async def test_awaited_sandbox_is_found_within_milliseconds_of_its_list(
    runtime: MemoryRuntime, delay: float
) -> None:
    """The pod's interface appears first; containers may be ready 40 ms after the sandbox."""
    async with _following(runtime) as calls:
        calls.is_awaited = True
        calls.sandboxes.hint()
        await asyncio.sleep(delay)
        runtime.run("a")
        before = now()
        await asyncio.sleep(1)
        assert (calls.when("sandbox", "a-0") or 99) - before <= 0.012


async def test_pod_that_waits_for_long_costs_no_lists_without_a_hint(
    runtime: MemoryRuntime,
) -> None:
    async with _following(runtime) as calls:
        calls.is_awaited = True
        runtime.lists.clear()
        await asyncio.sleep(60)
        assert len(runtime.lists) <= 7


async def test_slow_runtime_is_not_listed_all_the_time(runtime: MemoryRuntime) -> None:
    async with _following(runtime) as calls:
        calls.is_awaited = True
        runtime.list_seconds = 0.02
        runtime.lists.clear()
        calls.sandboxes.hint()
        await asyncio.sleep(3)
        # A fifth of the time, beside the lists that the hint and its echoes cause.
        assert len(runtime.lists) <= 3 / 0.1 + 4


async def test_awaited_sandbox_of_a_slow_runtime_is_found_as_soon_as_by_hints(
    runtime: MemoryRuntime,
) -> None:
    async with _following(runtime) as calls:
        calls.is_awaited = True
        calls.sandboxes.hint()
        await asyncio.sleep(0.6)
        runtime.list_seconds = 0.2
        await asyncio.sleep(0.3)
        runtime.run("a")
        before = now()
        await asyncio.sleep(2)
        # The list under way, the pause after it, and the two that find it.
        assert (calls.when("sandbox", "a-0") or 99) - before <= 0.2 + 0.1 + 2 * 0.2 + 0.05


async def test_lost_event_costs_at_most_ten_seconds(runtime: MemoryRuntime) -> None:
    async with _following(runtime) as calls:
        assert calls.sandboxes.has_events
        runtime.run("a")
        before = now()
        await asyncio.sleep(11)
        assert (calls.when("sandbox", "a-0") or 99) - before <= 10.1


async def test_idle_runtime_with_events_is_listed_six_times_a_minute(
    runtime: MemoryRuntime,
) -> None:
    async with _following(runtime, 10):
        runtime.lists.clear()
        await asyncio.sleep(60)
        assert 5 <= len(runtime.lists) <= 7


async def test_burst_of_events_causes_at_most_ten_lists_a_second(runtime: MemoryRuntime) -> None:
    async with _following(runtime):
        runtime.lists.clear()
        for _ in range(500):
            runtime.send("/tasks/start")
            await asyncio.sleep(0.002)
        assert len(runtime.lists) <= 11


async def test_runtime_without_events_is_listed_every_second(runtime: MemoryRuntime) -> None:
    runtime.stream_failure = CriUnimplementedError("no such call.")
    async with _following(runtime) as calls:
        assert not calls.sandboxes.has_events
        runtime.run("a")
        before = now()
        await asyncio.sleep(1.2)
        assert (calls.when("sandbox", "a-0") or 99) - before <= 1.1

        runtime.stream_failure = None  # it was replaced by one that has them
        await asyncio.sleep(310)
        assert calls.sandboxes.has_events


async def test_stream_that_ends_at_once_does_not_count(runtime: MemoryRuntime) -> None:
    """As CRI-O's where pod events are switched off."""

    async def ended() -> AsyncGenerator[str, None]:
        for event in list[str]():
            yield event

    runtime.events = ended  # type: ignore[method-assign]
    async with _following(runtime, 30) as calls:
        runtime.lists.clear()
        assert not calls.sandboxes.has_events
        await asyncio.sleep(10)
        assert len(runtime.lists) >= 9


async def test_broken_stream_is_a_hint_and_is_opened_again(runtime: MemoryRuntime) -> None:
    async with _following(runtime) as calls:
        runtime.run("a")
        before = now()
        runtime.send(None)
        await asyncio.sleep(0.2)
        assert calls.when("sandbox", "a-0") == before
        assert runtime.streams == []
        await asyncio.sleep(5)
        assert calls.sandboxes.has_events
        runtime.run("b")
        before = now()
        runtime.send("/tasks/start")
        await asyncio.sleep(1)
        assert calls.when("sandbox", "b-0") == before


async def test_sandboxes_stay_while_the_runtime_is_unreachable(runtime: MemoryRuntime) -> None:
    sandbox = runtime.run("a")
    runtime.start(sandbox.id)
    async with _following(runtime) as calls:
        before = list(calls.calls)
        runtime.failure = _AWAY
        runtime.stop(sandbox.id)
        await asyncio.sleep(60)
        assert calls.calls == before
        assert calls.sandboxes.problem == "it is away."

        runtime.failure = None
        await asyncio.sleep(1.2)
        assert calls.sandboxes.problem == ""
        assert calls.when("removed", sandbox.id)


async def test_runtime_missing_at_the_start_is_retried(runtime: MemoryRuntime) -> None:
    runtime.failure = _AWAY
    async with _following(runtime) as calls:
        assert calls.sandboxes.relists == 0
        runtime.run("a")
        runtime.failure = None
        await asyncio.sleep(1.2)
        assert list(calls.current) == ["a"]


async def test_ready_sandbox_with_the_highest_attempt_is_current(
    runtime: MemoryRuntime,
) -> None:
    made = [runtime.run("a", attempt) for attempt in range(4)]
    runtime.give_up("a-3")  # its namespace exists, but a ready one has precedence
    for order in itertools.permutations(made):
        runtime.sandboxes = {one.id: runtime.sandboxes[one.id] for one in order}
        calls = _Following(runtime)
        await calls.sandboxes.relist()
        assert calls.current["a"].id == "a-2"


async def test_stopped_sandbox_stays_while_its_namespace_exists(
    runtime: MemoryRuntime,
) -> None:
    sandbox = runtime.run("a")
    async with _following(runtime) as calls:
        runtime.give_up(sandbox.id)
        await asyncio.sleep(11)
        assert not calls.current["a"].is_ready
        del runtime.sandboxes[sandbox.id]  # forgotten by its runtime, too
        await asyncio.sleep(11)
        assert calls.current["a"].netns is not None
        new = runtime.run("a", 1)
        await asyncio.sleep(11)
        assert calls.current["a"].id == new.id
        assert calls.when("removed", sandbox.id) is None


async def test_finished_pod_is_looked_up_once_and_not_published(runtime: MemoryRuntime) -> None:
    runtime.run("a")
    runtime.stop("a-0")
    async with _following(runtime, 60) as calls:
        assert calls.calls == []
        assert len(runtime.looks) == 1


async def test_hanging_sandbox_does_not_delay_others(runtime: MemoryRuntime) -> None:
    runtime.run("stuck")
    runtime.slow.add("stuck-0")
    async with _following(runtime, 2) as calls:
        assert list(calls.current) == []
        runtime.run("fine")
        before = now()
        runtime.send("/tasks/start")
        await asyncio.sleep(0.2)
        assert calls.when("sandbox", "fine-0") == before
        assert not calls.sandboxes.is_settled
        await asyncio.sleep(20)
        assert calls.current["stuck"].problem == "it hangs."
        runtime.slow.clear()
        await asyncio.sleep(60)
        assert calls.current["stuck"].netns is not None
        assert calls.sandboxes.is_settled


async def test_namespace_removed_just_before_its_sandbox_is_no_problem(
    runtime: MemoryRuntime, tmp_path: pathlib.Path
) -> None:
    sandbox = runtime.run("a")
    async with _following(runtime) as calls:
        before = calls.current["a"]
        (tmp_path / sandbox.id).unlink()
        runtime.send("/tasks/exit")
        await asyncio.sleep(0.05)
        assert calls.current["a"] == before
        runtime.give_up(sandbox.id)
        await asyncio.sleep(0.3)
        assert [word for word, _ in calls.calls] == ["sandbox", "removed"]


async def test_lost_namespace_is_reported_and_looked_up_again(
    runtime: MemoryRuntime, tmp_path: pathlib.Path
) -> None:
    sandbox = runtime.run("a")
    runtime.stream_failure = CriUnimplementedError("no such call.")
    async with _following(runtime) as calls:
        (tmp_path / sandbox.id).rename(tmp_path / "away")
        await asyncio.sleep(3)
        assert calls.current["a"].netns is None
        assert calls.current["a"].problem == "It is nowhere."
        (tmp_path / "away").rename(tmp_path / sandbox.id)
        await asyncio.sleep(10)
        assert calls.current["a"].netns is not None


async def test_missing_namespace_is_looked_up_with_backoff(
    runtime: MemoryRuntime,
) -> None:
    runtime.run("a")
    runtime.lost.add("a-0")
    runtime.stream_failure = CriUnimplementedError("no such call.")
    async with _following(runtime, 600) as calls:
        assert calls.current["a"].problem == "It is nowhere."
        times = [time for time, _ in runtime.looks]
        assert len(times) <= 18
        assert max(b - a for a, b in itertools.pairwise(times)) <= 61.5

        runtime.lost.clear()
        await asyncio.sleep(62)
        assert calls.current["a"].netns is not None
        assert calls.current["a"].problem == ""


async def test_namespace_stays_when_the_runtime_fails(
    runtime: MemoryRuntime,
) -> None:
    sandbox = runtime.run("a")
    async with _following(runtime) as calls:
        found = calls.current["a"].netns
        runtime.broken.add(sandbox.id)
        runtime.give_up(sandbox.id)
        await asyncio.sleep(30)
        assert calls.current["a"].netns == found


async def test_newest_container_of_each_name_is_published_with_its_start(
    runtime: MemoryRuntime,
) -> None:
    sandbox = runtime.run("a")
    for name, attempt in (("app", 0), ("app", 1), ("side", 0)):
        runtime.start(sandbox.id, name, attempt)
    runtime.start("of nobody")
    async with _following(runtime) as calls:
        app, side = calls.sandboxes.containers["a"]
        assert (app.name, app.attempt, side.name) == ("app", 1, "side")
        assert app.started == BORN + datetime.timedelta(seconds=1)
        assert calls.when("containers", sandbox.id) == calls.when("sandbox", sandbox.id)

        runtime.stop(sandbox.id)
        await asyncio.sleep(11)
        assert calls.sandboxes.containers == {}


async def test_cancellation_does_not_wait(runtime: MemoryRuntime) -> None:
    runtime.run("stuck")
    runtime.slow.add("stuck-0")
    async with _following(runtime, 2):
        before = now()
    assert now() == before
    assert runtime.streams == []
