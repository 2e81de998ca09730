"""What is due at one tick is done by one thread, and nothing waits for a call that hangs."""

import asyncio
import contextvars
import threading
from collections.abc import Callable

import pytest

from agent.batches import in_thread


def fail() -> None:
    raise FileNotFoundError("no such file")


async def test_calls_of_one_turn_are_made_by_one_thread_in_their_order() -> None:
    made: list[tuple[int, int]] = []

    def call(number: int, *, result: str) -> str:
        made.append((number, threading.get_ident()))
        return result

    found = await asyncio.gather(*(in_thread(call, n, result=f"result {n}") for n in range(5)))
    assert found == [f"result {n}" for n in range(5)]
    assert [number for number, _ in made] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in made}) == 1
    assert made[0][1] != threading.get_ident()


async def test_other_tasks_of_the_turn_come_before_the_calls() -> None:
    order: list[str] = []

    async def other() -> None:
        order.append("other")

    async with asyncio.TaskGroup() as group:
        group.create_task(in_thread(lambda: order.append("call")))
        group.create_task(other())
    assert order == ["other", "call"]


async def test_error_is_raised_in_its_own_task_alone() -> None:
    found = await asyncio.gather(
        in_thread(fail), in_thread(lambda: "found"), return_exceptions=True
    )
    assert [type(found[0]), found[1]] == [FileNotFoundError, "found"]


async def test_call_that_hangs_holds_up_no_other() -> None:
    """Neither those before it nor those after it."""
    released = threading.Event()
    hangs = asyncio.create_task(in_thread(released.wait, 60))
    others: list[Callable[[], str]] = [lambda: "after", lambda: "last"]
    before = asyncio.create_task(in_thread(lambda: "before"))
    again = asyncio.create_task(in_thread(released.wait, 60))
    try:
        async with asyncio.timeout(30):
            found = await asyncio.gather(before, *map(in_thread, others))
        assert found == ["before", "after", "last"]
        assert not hangs.done()
        assert not again.done()
    finally:
        released.set()
        await asyncio.gather(hangs, again)


async def test_task_that_is_cancelled_leaves_the_others_their_results() -> None:
    released = threading.Event()
    cancelled = asyncio.create_task(in_thread(released.wait, 60))
    other = asyncio.create_task(in_thread(lambda: "found"))
    await asyncio.sleep(0)
    cancelled.cancel()
    released.set()
    assert await other == "found"
    assert cancelled.cancelled()


async def test_each_call_has_the_context_of_its_task() -> None:
    name_of_task: contextvars.ContextVar[str] = contextvars.ContextVar("name_of_task")

    async def call(name: str) -> str:
        name_of_task.set(name)
        return await in_thread(name_of_task.get)

    assert [*await asyncio.gather(call("first"), call("second"))] == ["first", "second"]


async def test_call_after_the_threads_have_ended_fails() -> None:
    await asyncio.get_running_loop().shutdown_default_executor()
    with pytest.raises(RuntimeError, match="shutdown"):
        await in_thread(lambda: None)
