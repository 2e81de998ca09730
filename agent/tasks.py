"""Long-lived tasks: named and supervised, so that none of them stops unnoticed."""

import asyncio
import collections
import contextlib
import contextvars
import random
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import ParamSpec, TypeVar

import structlog

from agent.backoff import Backoff, Jitter
from agent.errors import EXHAUSTED
from agent.logs import Event

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)

# A component that has run for this long starts again soon after its next failure.
_HEALTHY_SECONDS = 60.0
# A hung file system holds a thread for each attempt, and all components share 32 threads or fewer.
_MAX_TIMEOUTS = 5
# Without a supervisor, after a start that found no free descriptor.
_RETRY_SECONDS = 1.0
# A timer may be early by the clock's resolution: then the tick after it is meant.
_EARLY_SHARE = 0.01


class TaskEndedError(Exception):
    """A task that runs until the agent stops has returned."""


class Supervisor:
    """Starts components again after failures, with back-off, and counts these. For the event loop.

    Where one is in force (`supervised`), it supervises every `start`, in nested components as well:
    so only the innermost component that failed starts again.
    """

    def __init__(
        self,
        *,
        restarts: Callable[[Exception], bool] = lambda _: True,
        on_failure: Callable[[Exception], None] = lambda _: None,
        on_restart: Callable[[], None] = lambda: None,
        base_seconds: float = 1.0,
        cap_seconds: float = 60.0,
        jitter: Jitter = random.random,
    ) -> None:
        """restarts: whether a component starts again after this failure, otherwise it raises;
        on_failure: called at once; on_restart: called before a component starts again, which may
        have lost what it had taken from a queue."""
        self.failures = collections.Counter[str]()
        """By the component's name."""
        self._failing: dict[str, tuple[float, str]] = {}
        """By the component's name: until when, and the error."""
        self._restarts = restarts
        self._on_failure = on_failure
        self._on_restart = on_restart
        self._base_seconds, self._cap_seconds, self._jitter = base_seconds, cap_seconds, jitter

    def failing(self) -> dict[str, str]:
        """Errors of components that have not run for a minute since they failed, by name."""
        now = asyncio.get_running_loop().time()
        return {name: error for name, (until, error) in self._failing.items() if now < until}

    async def run(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run `run()` again and again until cancelled. Raises failures that do not restart it, and
        the last of many `TimeoutError`."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(
            base_seconds=self._base_seconds, cap_seconds=self._cap_seconds, jitter=self._jitter
        )
        timeouts = 0
        while True:
            started = loop.time()
            try:
                await run()
                error: Exception = TaskEndedError(f"task {name} stopped unexpectedly")
            except Exception as caught:
                error = caught
            task = asyncio.current_task()
            if task and task.cancelling():
                # It failed while it was being cancelled.
                raise asyncio.CancelledError from error
            timeouts = timeouts + 1 if isinstance(error, TimeoutError) else 0
            if timeouts > _MAX_TIMEOUTS or not self._restarts(error):
                raise error
            if loop.time() - started >= _HEALTHY_SECONDS:
                backoff.reset()
            seconds = backoff.next_seconds()
            self.failures[name] += 1
            self._failing[name] = (loop.time() + seconds + _HEALTHY_SECONDS, _sentence(error))
            log.error(
                Event.COMPONENT_FAILED,
                component=name,
                error=_sentence(error),
                at=_place(error),
                retry_seconds=round(seconds, 1),
            )
            self._on_failure(error)
            await asyncio.sleep(seconds)
            self._on_restart()


_supervisor: contextvars.ContextVar[Supervisor | None] = contextvars.ContextVar(
    "supervisor", default=None
)


@contextlib.contextmanager
def supervised(supervisor: Supervisor) -> Iterator[None]:
    """Tasks that are started inside, and in these tasks, are the supervisor's."""
    token = _supervisor.set(supervisor)
    try:
        yield
    finally:
        _supervisor.reset(token)


def start(
    group: asyncio.TaskGroup, name: str, run: Callable[[], Awaitable[None]]
) -> asyncio.Task[None]:
    """Run `run()` until the group is cancelled.

    When it raises or returns, it starts again where a supervisor is in force. Elsewhere the group
    fails and the process stops: gates stay pinned, and the DaemonSet or systemd starts another
    agent. An agent without one of its tasks would be worse. But another process would find no more
    descriptors than this one, so a task that finds none starts again everywhere.
    """
    return group.create_task(_watch(name, run), name=name)


async def _watch(name: str, run: Callable[[], Awaitable[None]]) -> None:
    if supervisor := _supervisor.get():
        await supervisor.run(name, run)
    while True:
        try:
            await run()
        except (OSError, ExceptionGroup) as error:
            if not is_shortage(error):
                raise
            log.error(Event.TASK_WITHOUT_DESCRIPTOR, task=name, error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            raise TaskEndedError(f"task {name} stopped unexpectedly")


def next_tick(seconds: float) -> float:
    """The next multiple of `seconds` by the event loop's clock.

    What has to be done again and again, and at no exact time, is done then: components whose
    periods are multiples of one second wake the process together, once a second instead of once
    for each of them.
    """
    now = asyncio.get_running_loop().time()
    left = seconds - now % seconds
    return now + (left if left > seconds * _EARLY_SHARE else left + seconds)


async def tick(seconds: float) -> None:
    """Wait for `next_tick`: at most a little longer than `seconds`."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(next_tick(seconds) - loop.time())


async def close_in_thread(close: Callable[[], None]) -> None:
    """For what a task does at its end and blocks, such as to close a packet socket, which waits for
    RCU: `close` is called although the task is cancelled again meanwhile."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, close))


def is_shortage(error: BaseException) -> bool:
    """Whether there was no free descriptor, of this process or of the machine, and no other
    problem."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_shortage, error.exceptions))
    return isinstance(error, OSError) and error.errno in EXHAUSTED


def _innermost(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _sentence(error: Exception) -> str:
    found = _innermost(error)
    return f"{type(found).__name__}: {found}" if str(found) else type(found).__name__


def _place(error: Exception) -> str:
    """Where it was raised: "agent/tasks.py:12 in start"."""
    frames = traceback.extract_tb(_innermost(error).__traceback__)
    if not frames:
        return ""
    package = [one for one in frames if "/agent/" in one.filename or "/bpf/" in one.filename]
    frame = (package or list(frames))[-1]
    return f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno} in {frame.name}"
