"""A component that fails starts again, and no other notices."""

import asyncio
import contextlib
import errno
import json
import os
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import structlog.testing

from agent import tasks
from agent.app import rings
from agent.app.rings import Rings
from agent.backoff import no_jitter
from agent.linux.descriptors import Reserve
from agent.logs import Event
from agent.tasks import Supervisor, TaskEndedError

pytestmark = pytest.mark.looptime

Run = Callable[[], Awaitable[None]]


class Component:
    """Fails the first times it runs."""

    def __init__(self, *errors: Exception, after_seconds: float = 0.0) -> None:
        self.errors = list(errors)
        self.starts: list[float] = []
        self._after_seconds = after_seconds

    async def run(self) -> None:
        self.starts.append(asyncio.get_running_loop().time())
        if self.errors:
            await asyncio.sleep(self._after_seconds)
            raise self.errors.pop(0)
        await asyncio.Event().wait()


async def _run(seconds: float, *started: tuple[Supervisor, str, Run]) -> None:
    """All of them in one group, for a time. Raises their failure."""
    async with asyncio.TaskGroup() as group:
        running = []
        for supervisor, name, run in started:
            with tasks.supervised(supervisor):
                running.append(tasks.start(group, name, run))
        await asyncio.sleep(seconds)
        for task in running:
            task.cancel()


async def test_failed_component_starts_again_with_back_off_and_others_go_on() -> None:
    bad = Component(*(ValueError(str(number)) for number in range(5)))
    good = Component()
    supervisor = Supervisor(jitter=no_jitter)
    began = asyncio.get_running_loop().time()
    await _run(100, (supervisor, "bad", bad.run), (supervisor, "good", good.run))
    assert [round(at - began) for at in bad.starts] == [0, 1, 3, 7, 15, 31]
    assert len(good.starts) == 1
    assert supervisor.failures == {"bad": 5}


async def decode() -> None:
    json.loads("{")


async def of_gates() -> None:
    """As a module of bpf that calls the standard library."""
    code = compile("json.loads('{')", "/usr/lib/podgate/bpf/gates.py", "exec")
    exec(code, {"json": json})


async def of_library() -> None:
    """An error that no frame of podgate saw: it comes from a task of a library."""
    error = ExceptionGroup("tasks", [ValueError(), OSError("a later one")])
    try:
        json.loads("{")
    except ValueError as caught:
        traceback = caught.__traceback__
        assert traceback is not None
        error.exceptions[0].__traceback__ = traceback.tb_next
    raise error


async def ends() -> None:
    """A component that returns."""


@pytest.mark.parametrize(
    ("run", "error", "place"),
    [
        (decode, "JSONDecodeError: Expecting property name", r"agent/test_tasks.py:\d+ in decode"),
        (of_gates, "JSONDecodeError: Expecting", r"podgate/bpf/gates.py:1 in <module>"),
        (of_library, "ValueError", r"[^/]+/json/\w+.py:\d+ in \w+"),
        (ends, "TaskEndedError: task bad stopped unexpectedly", ""),
    ],
)
async def test_failure_is_logged_with_the_place_in_podgate_that_it_came_from(
    run: Run, error: str, place: str
) -> None:
    with structlog.testing.capture_logs() as lines:
        await _run(0.5, (Supervisor(jitter=no_jitter), "bad", run))
    (line,) = lines
    assert (line["event"], line["log_level"]) == (Event.COMPONENT_FAILED, "error")
    assert (line["component"], line["retry_seconds"]) == ("bad", 1.0)
    assert line["error"].startswith(error)
    assert re.fullmatch(f"(tests/)?{place}" if place else "", line["at"]), line["at"]


async def test_component_that_ran_for_long_starts_again_soon() -> None:
    bad = Component(*(ValueError() for _ in range(5)), after_seconds=100.0)
    await _run(1000, (Supervisor(jitter=no_jitter), "bad", bad.run))
    assert [b - a for a, b in zip(bad.starts, bad.starts[1:], strict=False)] == [101] * 5


async def test_component_is_failing_until_it_has_run_for_a_minute() -> None:
    bad = Component(ValueError("no room"))
    supervisor = Supervisor(jitter=no_jitter)
    await _run(60, (supervisor, "bad", bad.run))
    assert supervisor.failing() == {"bad": "ValueError: no room"}
    await asyncio.sleep(2)
    assert supervisor.failing() == {}


async def test_component_that_returns_starts_again() -> None:
    starts = []

    async def run() -> None:
        starts.append(1)

    await _run(10, (Supervisor(), "bad", run))
    assert len(starts) > 2


async def test_innermost_component_starts_again_alone() -> None:
    bad, sibling = Component(OSError(errno.EMFILE, "")), Component()
    outer_starts = []

    async def outer() -> None:
        outer_starts.append(1)
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "bad", bad.run)
            tasks.start(group, "sibling", sibling.run)

    supervisor = Supervisor()
    await _run(10, (supervisor, "outer", outer))
    assert (len(outer_starts), len(bad.starts), len(sibling.starts)) == (1, 2, 1)
    assert supervisor.failures == {"bad": 1}


async def test_without_a_supervisor_a_failure_ends_the_group() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "bad", Component(ValueError()).run)
    assert isinstance(caught.value.exceptions[0], ValueError)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "ends", lambda: asyncio.sleep(0))
    assert isinstance(caught.value.exceptions[0], TaskEndedError)


async def test_failure_during_cancellation_ends_the_component() -> None:
    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("closing failed")

    async with asyncio.timeout(5):
        await _run(1, (Supervisor(), "bad", run))


async def test_file_system_that_hangs_ends_the_agent_before_its_threads_are_used_up() -> None:
    bad = Component(*(TimeoutError() for _ in range(20)))
    with pytest.raises(ExceptionGroup):
        await _run(1000, (Supervisor(), "bad", bad.run))
    assert len(bad.starts) == 6


async def test_queues_are_marked_before_a_component_starts_again() -> None:
    marked: list[float] = []
    bad = Component(ValueError())
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(on_restart=lambda: marked.append(loop.time()))
    await _run(10, (supervisor, "bad", bad.run))
    assert marked == bad.starts[1:]


def _rings() -> Rings:
    return Rings(on_restart=lambda: None, jitter=no_jitter)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
        RuntimeError("can't start new thread"),
        ExceptionGroup("", [OSError(errno.ENFILE, "")]),
    ],
)
async def test_inner_ring_retries_within_a_second_what_may_pass(error: Exception) -> None:
    both = _rings()
    heartbeat = Component(error)
    try:
        await _run(10, (both.supervisor("heartbeat"), "heartbeat", heartbeat.run))
    finally:
        both.close()
    assert heartbeat.starts[1] - heartbeat.starts[0] < 1
    (metric,) = both.collect()
    assert [(one.labels, one.value) for one in metric.samples] == [({"component": "heartbeat"}, 1)]


@pytest.mark.parametrize("error", [ValueError(), TimeoutError(), OSError(errno.EPERM, "")])
async def test_inner_ring_ends_the_agent_by_any_other_failure(error: Exception) -> None:
    both = _rings()
    try:
        with pytest.raises(ExceptionGroup):
            await _run(10, (both.supervisor("reconciler"), "reconciler", Component(error).run))
    finally:
        both.close()


async def test_component_outside_the_inner_ring_never_ends_the_agent() -> None:
    both = _rings()
    probes = Component(ValueError(), OSError(errno.EPERM, ""), ExceptionGroup("", [KeyError()]))
    try:
        await _run(60, (both.supervisor("probes"), "probes", probes.run))
    finally:
        both.close()
    assert len(probes.starts) == 4


def _hold(held: list[int]) -> int:
    """Open all descriptors that are left; their number."""
    count = 0
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
            count += 1
    return count


async def test_inner_ring_gets_descriptors_when_others_have_used_all_up() -> None:
    """By the limit of this process, with descriptors that others hold."""
    import resource

    both = _rings()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    opened: list[float] = []

    async def kubelet() -> None:
        os.close(os.open("/dev/null", os.O_RDONLY))
        opened.append(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    highest = os.open("/dev/null", os.O_RDONLY)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, limits[1]))
    try:
        _hold(held)
        await _run(3, (both.supervisor("kubelet"), "kubelet", kubelet))
    finally:
        for descriptor in held:
            os.close(descriptor)
        both.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(opened) == 1


async def test_reserve_is_taken_again_once_there_are_enough_descriptors() -> None:
    """Until then, the few that are free are left to the components."""
    import resource

    both = _rings()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    highest = os.open("/dev/null", os.O_RDONLY)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, limits[1]))
    try:
        _hold(held)
        failing = Component(OSError(errno.EMFILE, ""), OSError(errno.EMFILE, ""))
        with structlog.testing.capture_logs() as lines:
            await _run(1, (both.supervisor("kubelet"), "kubelet", failing.run))
        released = [line["released"] for line in lines if "released" in line]
        assert (released, _hold(held)) == ([64], 64)
        for _ in range(3):
            os.close(held.pop())
        await asyncio.sleep(6)
        assert _hold(held) == 3
        for _ in range(70):
            os.close(held.pop())
        await asyncio.sleep(6)
        assert _hold(held) == 6
    finally:
        for descriptor in held:
            os.close(descriptor)
        both.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_components_of_both_rings_are_reported() -> None:
    both = _rings()
    kubelet = Component(*(OSError(errno.ENOMEM, "Cannot allocate memory") for _ in range(2)))
    probes = Component(ValueError("No such probe."))
    with structlog.testing.capture_logs() as lines:
        await _run(
            10,
            (both.supervisor("probes"), "probes", probes.run),
            (both.supervisor("kubelet"), "kubelet", kubelet.run),
        )
    both.close()
    assert {line["event"] for line in lines} == {Event.COMPONENT_FAILED}
    assert list(both.problems()) == [
        "Component kubelet fails and starts again: OSError: [Errno 12] Cannot allocate memory.",
        "Component probes fails and starts again: ValueError: No such probe.",
    ]
    (metric,) = both.collect()
    assert [(one.labels, one.value) for one in metric.samples] == [
        ({"component": "kubelet"}, 2),
        ({"component": "probes"}, 1),
    ]


def test_reserve_is_filled_again() -> None:
    reserve = Reserve(4)
    reserve.release()
    assert len(reserve) == 0
    assert reserve.refill()
    assert len(reserve) == 4
    reserve.release()


def test_inner_ring_has_what_it_names() -> None:
    """By the names under which they are started."""
    import inspect

    from agent.app import agent, gating, kubelet_access

    sources = "".join(map(inspect.getsource, (agent, gating, kubelet_access)))
    missing = [name for name in rings.INNER if f'yield "{name}"' not in sources]
    assert missing == []


async def test_cancelled_task_still_closes_in_a_thread() -> None:
    loop = asyncio.get_running_loop()
    closed, may_go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as executor:
        loop.set_default_executor(executor)
        busy = loop.run_in_executor(None, may_go_on.wait, 60)
        task = asyncio.create_task(tasks.close_in_thread(closed.set))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not closed.is_set()
        may_go_on.set()
        await busy
    assert closed.is_set()
