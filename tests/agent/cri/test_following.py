"""Following a runtime: lists, hints, failures; in fake time."""

import asyncio
import contextlib
import datetime
import itertools
import json
import pathlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import msgspec
import pytest

from agent.cri.client import CriError, CriNotFoundError, CriStuckError, CriUnimplementedError
from agent.cri.models import (
    CriContainer,
    CriContainerState,
    NetworkedSandbox,
    Sandbox,
    SandboxDetails,
)
from agent.cri.sandbox_netns import SandboxNetns
from agent.cri.sandboxes import Sandboxes
from probes.netns import Netns
from tests.blocking import may_block
from tests.runtime.watching import Watched

pytestmark = pytest.mark.looptime

_DETAILS = SandboxDetails(host_network=False, ips=(), info={})
_BORN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
_AWAY = CriError("it is away.")


class _Runtime:
    """A runtime in memory; namespaces are files, which exist or not."""

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
        self.is_awaited = False
        """Whether a pod of the node has no sandbox yet."""
        self.list_seconds = 0.0
        self.lists: list[float] = []
        self.looks: list[tuple[float, str]] = []

    def run(self, uid: str, attempt: int = 0, *, name: str | None = None) -> Sandbox:
        sandbox = Sandbox(
            id=name or f"{uid}-{attempt}",
            pod_uid=uid,
            pod_name=uid,
            pod_namespace="tests",
            attempt=attempt,
            created=_BORN + datetime.timedelta(seconds=attempt),
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
            created=_BORN + datetime.timedelta(seconds=attempt),
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
        self.lists.append(_now())
        await asyncio.sleep(self.list_seconds)
        if self.failure:
            raise self.failure
        return list(self.sandboxes.values())

    async def list_containers(self) -> list[CriContainer]:
        return list(self.containers.values())

    async def sandbox_details(self, sandbox_id: str) -> SandboxDetails:
        self.looks.append((_now(), sandbox_id))
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
        pass


class _Following(Watched):
    """`Sandboxes` and when they changed: seconds of each change in `calls`."""

    def __init__(self, runtime: _Runtime) -> None:
        self.times: list[float] = []

        async def open_runtime() -> _Runtime:
            return runtime

        super().__init__(
            Sandboxes(open_runtime, runtime.locate, is_awaited=lambda: runtime.is_awaited)
        )

    @property
    def current(self) -> dict[str, Sandbox]:
        return self.sandboxes.current

    def when(self, word: str, sandbox_id: str) -> float | None:
        calls = zip(self.times, self.calls, strict=True)
        return next((time for time, call in calls if call == (word, sandbox_id)), None)

    def note(self, change: str, sandbox: Sandbox) -> None:
        super().note(change, sandbox)
        self.times.append(_now())


@pytest.fixture
def runtime(tmp_path: pathlib.Path) -> _Runtime:
    return _Runtime(tmp_path)


@contextlib.asynccontextmanager
async def _following(runtime: _Runtime, settle_seconds: float = 5) -> AsyncIterator[_Following]:
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
    runtime: _Runtime,
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
    runtime: _Runtime,
) -> None:
    runtime.run("a")
    runtime.lost.add("a-0")
    runtime.unreadable.add("a-0")
    async with _following(runtime, 300) as calls:
        runtime.lost.clear()
        await asyncio.sleep(2)
        assert calls.current["a"].netns is not None


async def test_grpc_that_ends_no_call_is_a_reason_to_start_the_agent_again(
    runtime: _Runtime,
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


async def test_event_triggers_a_list_at_once(runtime: _Runtime) -> None:
    async with _following(runtime) as calls:
        runtime.run("a")
        now = _now()
        runtime.send("/tasks/start")
        await asyncio.sleep(1)
        assert calls.when("sandbox", "a-0") == now


async def test_sandbox_listed_after_its_event_is_found_soon(runtime: _Runtime) -> None:
    async with _following(runtime) as calls:
        now = _now()
        runtime.send("/tasks/start")
        await asyncio.sleep(0.3)
        runtime.run("a")
        await asyncio.sleep(1)
        assert (calls.when("sandbox", "a-0") or 99) - now <= 0.6


def _added(runtime: _Runtime, uid: str, attempt: int = 0) -> Sandbox:
    """A sandbox that has its network, and that the runtime does not list yet."""
    sandbox = runtime.run(uid, attempt)
    del runtime.sandboxes[sandbox.id]
    return msgspec.structs.replace(sandbox, attempt=0, created=None, is_ready=False)


async def test_added_sandbox_is_current_before_and_after_it_is_listed(runtime: _Runtime) -> None:
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
    runtime: _Runtime,
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


async def test_added_sandbox_goes_with_its_namespace(runtime: _Runtime) -> None:
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


async def test_ready_sandbox_is_not_replaced_by_an_added_one(runtime: _Runtime) -> None:
    async with _following(runtime) as calls:
        runtime.run("a")
        calls.sandboxes.hint()
        await asyncio.sleep(5)
        for uid_attempt in (0, 1):
            sandbox = _added(runtime, "a", uid_attempt)
            await calls.sandboxes.add(NetworkedSandbox(sandbox, sandbox.id))
        assert calls.current["a"].id == "a-0"
        assert calls.current["a"].is_ready


async def test_added_sandbox_without_its_addresses_is_left_to_the_list(runtime: _Runtime) -> None:
    async with _following(runtime) as calls:
        sandbox = _added(runtime, "a")
        runtime.lost.add(sandbox.id)
        await calls.sandboxes.add(NetworkedSandbox(sandbox, sandbox.id))
        assert calls.current == {}


@pytest.mark.parametrize("delay", [0.013, 0.237, 0.9, 2.5])
async def test_awaited_sandbox_is_found_within_milliseconds_of_its_list(
    runtime: _Runtime, delay: float
) -> None:
    """The pod's interface appears first; containers may be ready 40 ms after the sandbox."""
    async with _following(runtime) as calls:
        runtime.is_awaited = True
        calls.sandboxes.hint()
        await asyncio.sleep(delay)
        runtime.run("a")
        now = _now()
        await asyncio.sleep(1)
        assert (calls.when("sandbox", "a-0") or 99) - now <= 0.012


async def test_pod_that_waits_for_long_costs_no_lists_without_a_hint(runtime: _Runtime) -> None:
    runtime.is_awaited = True
    async with _following(runtime):
        runtime.lists.clear()
        await asyncio.sleep(60)
        assert len(runtime.lists) <= 7


async def test_slow_runtime_is_not_listed_all_the_time(runtime: _Runtime) -> None:
    async with _following(runtime) as calls:
        runtime.is_awaited = True
        runtime.list_seconds = 0.02
        runtime.lists.clear()
        calls.sandboxes.hint()
        await asyncio.sleep(3)
        # A fifth of the time, beside the lists that the hint and its echoes cause.
        assert len(runtime.lists) <= 3 / 0.1 + 4


async def test_awaited_sandbox_of_a_slow_runtime_is_found_as_soon_as_by_hints(
    runtime: _Runtime,
) -> None:
    async with _following(runtime) as calls:
        runtime.is_awaited = True
        calls.sandboxes.hint()
        await asyncio.sleep(0.6)
        runtime.list_seconds = 0.2
        await asyncio.sleep(0.3)
        runtime.run("a")
        now = _now()
        await asyncio.sleep(2)
        # The list under way, the pause after it, and the two that find it.
        assert (calls.when("sandbox", "a-0") or 99) - now <= 0.2 + 0.1 + 2 * 0.2 + 0.05


async def test_lost_event_costs_at_most_ten_seconds(runtime: _Runtime) -> None:
    async with _following(runtime) as calls:
        assert calls.sandboxes.has_events
        runtime.run("a")
        now = _now()
        await asyncio.sleep(11)
        assert (calls.when("sandbox", "a-0") or 99) - now <= 10.1


async def test_idle_runtime_with_events_is_listed_six_times_a_minute(runtime: _Runtime) -> None:
    async with _following(runtime, 10):
        runtime.lists.clear()
        await asyncio.sleep(60)
        assert 5 <= len(runtime.lists) <= 7


async def test_burst_of_events_causes_at_most_ten_lists_a_second(runtime: _Runtime) -> None:
    async with _following(runtime):
        runtime.lists.clear()
        for _ in range(500):
            runtime.send("/tasks/start")
            await asyncio.sleep(0.002)
        assert len(runtime.lists) <= 11


async def test_runtime_without_events_is_listed_every_second(runtime: _Runtime) -> None:
    runtime.stream_failure = CriUnimplementedError("no such call.")
    async with _following(runtime) as calls:
        assert not calls.sandboxes.has_events
        runtime.run("a")
        now = _now()
        await asyncio.sleep(1.2)
        assert (calls.when("sandbox", "a-0") or 99) - now <= 1.1

        runtime.stream_failure = None  # it was replaced by one that has them
        await asyncio.sleep(310)
        assert calls.sandboxes.has_events


async def test_stream_that_ends_at_once_does_not_count(runtime: _Runtime) -> None:
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


async def test_broken_stream_is_a_hint_and_is_opened_again(runtime: _Runtime) -> None:
    async with _following(runtime) as calls:
        runtime.run("a")
        now = _now()
        runtime.send(None)
        await asyncio.sleep(0.2)
        assert calls.when("sandbox", "a-0") == now
        assert runtime.streams == []
        await asyncio.sleep(5)
        assert calls.sandboxes.has_events
        runtime.run("b")
        now = _now()
        runtime.send("/tasks/start")
        await asyncio.sleep(1)
        assert calls.when("sandbox", "b-0") == now


async def test_sandboxes_stay_while_the_runtime_is_unreachable(runtime: _Runtime) -> None:
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


async def test_runtime_missing_at_the_start_is_retried(runtime: _Runtime) -> None:
    runtime.failure = _AWAY
    async with _following(runtime) as calls:
        assert calls.sandboxes.relists == 0
        runtime.run("a")
        runtime.failure = None
        await asyncio.sleep(1.2)
        assert list(calls.current) == ["a"]


async def test_ready_sandbox_with_the_highest_attempt_is_current(
    runtime: _Runtime,
) -> None:
    made = [runtime.run("a", attempt) for attempt in range(4)]
    runtime.give_up("a-3")  # its namespace exists, but a ready one has precedence
    for order in itertools.permutations(made):
        runtime.sandboxes = {one.id: runtime.sandboxes[one.id] for one in order}
        calls = _Following(runtime)
        await calls.sandboxes.relist()
        assert calls.current["a"].id == "a-2"


async def test_stopped_sandbox_stays_while_its_namespace_exists(
    runtime: _Runtime,
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


async def test_finished_pod_is_looked_up_once_and_not_published(runtime: _Runtime) -> None:
    runtime.run("a")
    runtime.stop("a-0")
    async with _following(runtime, 60) as calls:
        assert calls.calls == []
        assert len(runtime.looks) == 1


async def test_hanging_sandbox_does_not_delay_others(runtime: _Runtime) -> None:
    runtime.run("stuck")
    runtime.slow.add("stuck-0")
    async with _following(runtime, 2) as calls:
        assert list(calls.current) == []
        runtime.run("fine")
        now = _now()
        runtime.send("/tasks/start")
        await asyncio.sleep(0.2)
        assert calls.when("sandbox", "fine-0") == now
        assert not calls.sandboxes.is_settled
        await asyncio.sleep(20)
        assert calls.current["stuck"].problem == "it hangs."
        runtime.slow.clear()
        await asyncio.sleep(60)
        assert calls.current["stuck"].netns is not None
        assert calls.sandboxes.is_settled


async def test_namespace_removed_just_before_its_sandbox_is_no_problem(
    runtime: _Runtime, tmp_path: pathlib.Path
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
    runtime: _Runtime, tmp_path: pathlib.Path
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
    runtime: _Runtime,
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
    runtime: _Runtime,
) -> None:
    sandbox = runtime.run("a")
    async with _following(runtime) as calls:
        found = calls.current["a"].netns
        runtime.broken.add(sandbox.id)
        runtime.give_up(sandbox.id)
        await asyncio.sleep(30)
        assert calls.current["a"].netns == found


async def test_newest_container_of_each_name_is_published_with_its_start(
    runtime: _Runtime,
) -> None:
    sandbox = runtime.run("a")
    for name, attempt in (("app", 0), ("app", 1), ("side", 0)):
        runtime.start(sandbox.id, name, attempt)
    runtime.start("of nobody")
    async with _following(runtime) as calls:
        app, side = calls.sandboxes.containers["a"]
        assert (app.name, app.attempt, side.name) == ("app", 1, "side")
        assert app.started == _BORN + datetime.timedelta(seconds=1)
        assert calls.when("containers", sandbox.id) == calls.when("sandbox", sandbox.id)

        runtime.stop(sandbox.id)
        await asyncio.sleep(11)
        assert calls.sandboxes.containers == {}


async def test_cancellation_does_not_wait(runtime: _Runtime) -> None:
    runtime.run("stuck")
    runtime.slow.add("stuck-0")
    async with _following(runtime, 2):
        now = _now()
    assert _now() == now
    assert runtime.streams == []


def _now() -> float:
    return round(asyncio.get_running_loop().time(), 3)
