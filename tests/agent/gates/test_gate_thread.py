"""Calls that wait for RTNL run one after the other, urgent ones first."""

import asyncio
import functools
import threading

import pytest

from agent.gates.gate_thread import GateThread


@pytest.fixture
async def gate_thread() -> GateThread:
    return GateThread()


async def test_urgent_call_overtakes_those_that_wait(gate_thread: GateThread) -> None:
    began, held = threading.Event(), threading.Event()
    order: list[str] = []

    def hold() -> None:
        began.set()
        held.wait(60)
        order.append("running")

    running = asyncio.create_task(gate_thread.run(hold))
    await asyncio.to_thread(began.wait, 60)
    waiting = [
        asyncio.create_task(gate_thread.run(functools.partial(order.append, name)))
        for name in ("first", "second")
    ]
    await asyncio.sleep(0)
    urgent = asyncio.create_task(gate_thread.run(lambda: order.append("urgent"), is_urgent=True))
    await asyncio.sleep(0)
    held.set()
    await asyncio.gather(running, urgent, *waiting)
    assert order == ["running", "urgent", "first", "second"]
    gate_thread.close()


async def test_call_returns_and_raises(gate_thread: GateThread) -> None:
    assert await gate_thread.run(lambda: 7) == 7

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await gate_thread.run(fail)
    gate_thread.close()


async def test_cancelled_call_does_not_begin_and_holds_no_other_up(
    gate_thread: GateThread,
) -> None:
    began, held = threading.Event(), threading.Event()
    ran: list[str] = []

    def hold() -> None:
        began.set()
        held.wait(60)

    running = asyncio.create_task(gate_thread.run(hold))
    await asyncio.to_thread(began.wait, 60)
    cancelled = asyncio.create_task(gate_thread.run(lambda: ran.append("cancelled")))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    held.set()
    await running
    await gate_thread.run(lambda: ran.append("next"))
    assert ran == ["next"]
    gate_thread.close()
