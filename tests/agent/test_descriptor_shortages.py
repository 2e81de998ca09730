"""A long-lived task that finds no free descriptor starts again; one that fails ends the process."""

import asyncio
import errno
import os

import pytest
import structlog

from agent import tasks
from agent.logs import Event
from agent.tasks import TaskEndedError


class Runs:
    """A task that raises these, one after the other, and then waits."""

    def __init__(self, *errors: BaseException) -> None:
        self._errors = list(errors)
        self.is_waiting = asyncio.Event()

    async def run(self) -> None:
        if self._errors:
            raise self._errors.pop(0)
        self.is_waiting.set()
        await asyncio.Event().wait()


def shortage(number: int = errno.EMFILE) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.looptime
async def test_task_without_a_free_descriptor_starts_again() -> None:
    nested = ExceptionGroup("tasks", [shortage(), ExceptionGroup("more", [shortage()])])
    runs = Runs(shortage(), shortage(errno.ENFILE), nested)
    now = asyncio.get_running_loop().time
    began = now()
    with structlog.testing.capture_logs() as logged:
        async with asyncio.TaskGroup() as group:
            task = tasks.start(group, "links", runs.run)
            await runs.is_waiting.wait()
            assert round(now() - began, 1) == 3.0
            task.cancel()
    assert [line["event"] for line in logged] == 3 * [Event.TASK_WITHOUT_DESCRIPTOR]
    assert {line["task"] for line in logged} == {"links"}


@pytest.mark.parametrize(
    "error",
    [shortage(errno.EIO), ValueError(), ExceptionGroup("tasks", [shortage(), ValueError()])],
    ids=repr,
)
async def test_other_errors_end_the_group(error: Exception) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "links", Runs(error).run)
    assert caught.value.exceptions == (error,)


async def test_task_that_returns_ends_the_group() -> None:
    async def run() -> None:
        pass

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "links", run)
    assert isinstance(caught.value.exceptions[0], TaskEndedError)
