"""Calls that wait for RTNL run one after the other, after repairs, and urgent ones first."""

import asyncio
import functools
import os
import select
import socket
import sys
import threading
from types import SimpleNamespace

import pytest

from agent.gates import gate_thread as gate_thread_module
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


class Repairs:
    """One repair for each message."""

    def __init__(self, order: list[str]) -> None:
        self.order = order
        self.made = threading.Event()
        self.error: Exception | None = None
        self.is_closed = threading.Event()
        self.kernel, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._waiting: list[str] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> None:
        try:
            self._waiting.append(self._socket.recv(100).decode())
        except BlockingIOError:
            return

    def next(self) -> bool:
        if not self._waiting:
            return False
        if self.error:
            raise self.error
        self.order.append(self._waiting.pop())
        self.made.set()
        return True

    def close(self) -> None:
        self._socket.close()
        self.kernel.close()
        self.is_closed.set()


async def test_repair_waits_for_no_call_and_needs_none(gate_thread: GateThread) -> None:
    repairs = Repairs([])
    await gate_thread.run(functools.partial(gate_thread.repair, repairs))
    repairs.kernel.send(b"lost")
    assert await asyncio.to_thread(repairs.made.wait, 60)
    assert repairs.order == ["lost"]
    gate_thread.close()
    assert await asyncio.to_thread(repairs.is_closed.wait, 60)


async def test_repairs_overtake_all_calls(gate_thread: GateThread) -> None:
    order: list[str] = []
    repairs = Repairs(order)
    await gate_thread.run(functools.partial(gate_thread.repair, repairs))
    began, held = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        held.wait(60)

    running = asyncio.create_task(gate_thread.run(hold))
    await asyncio.to_thread(began.wait, 60)
    urgent = asyncio.create_task(gate_thread.run(lambda: order.append("urgent"), is_urgent=True))
    await asyncio.sleep(0)
    for name in (b"first", b"second"):
        repairs.kernel.send(name)
    held.set()
    await asyncio.gather(running, urgent)
    assert order == ["first", "second", "urgent"]
    gate_thread.close()


async def test_repairs_are_made_between_the_steps_of_a_call(gate_thread: GateThread) -> None:
    order: list[str] = []
    repairs = Repairs(order)
    await gate_thread.run(functools.partial(gate_thread.repair, repairs))

    def call() -> None:
        order.append("first step")
        for name in (b"lost", b"lost, too"):
            repairs.kernel.send(name)
        gate_thread.breathe()
        order.append("second step")

    await gate_thread.run(call)
    assert order == ["first step", "lost", "lost, too", "second step"]
    gate_thread.close()


@pytest.mark.parametrize("error", [OSError("broken"), ValueError("odd bytes")], ids=type)
async def test_repairs_that_fail_end_and_calls_go_on(
    gate_thread: GateThread, error: Exception
) -> None:
    repairs = Repairs([])
    repairs.error = error
    await gate_thread.run(functools.partial(gate_thread.repair, repairs))
    repairs.kernel.send(b"lost")
    assert await asyncio.to_thread(repairs.is_closed.wait, 60)
    assert await gate_thread.run(lambda: 7) == 7
    gate_thread.close()


async def test_later_repairs_replace_previous_ones(gate_thread: GateThread) -> None:
    """The component that follows gates has started again."""
    first, second = Repairs([]), Repairs([])
    for repairs in (first, second):
        await gate_thread.run(functools.partial(gate_thread.repair, repairs))
    assert first.is_closed.is_set()
    second.kernel.send(b"lost")
    assert await asyncio.to_thread(second.made.wait, 60)
    gate_thread.close()
    assert await asyncio.to_thread(second.is_closed.wait, 60)


async def test_thread_that_has_ended_may_be_closed_again(
    gate_thread: GateThread, capfd: pytest.CaptureFixture[str]
) -> None:
    (thread,) = (one for one in threading.enumerate() if one.name == "gates")
    before = await asyncio.to_thread(os.listdir, "/proc/self/fd")
    gate_thread.close()
    await asyncio.to_thread(thread.join, 60)
    gate_thread.close()
    assert capfd.readouterr() == ("", "")
    # What wakes it, and what it waits by.
    assert len(await asyncio.to_thread(os.listdir, "/proc/self/fd")) == len(before) - 2


class _Waits:
    """An epoll that counts how often a wait has ended."""

    def __init__(self) -> None:
        self.ended = 0
        self._epoll = select.epoll()
        self.register = self._epoll.register
        self.close = self._epoll.close

    def poll(self) -> None:
        self._epoll.poll()
        self.ended += 1


async def test_thread_sleeps_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = _Waits()
    monkeypatch.setattr(
        gate_thread_module, "select", SimpleNamespace(epoll=lambda: waits, EPOLLIN=select.EPOLLIN)
    )
    gate_thread = GateThread()
    for _ in range(3):
        await gate_thread.run(lambda: None)
        await asyncio.sleep(0.002)
    assert waits.ended <= 3
    gate_thread.close()


def test_thread_waits_for_pythons_lock_for_less_than_a_millisecond() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        GateThread().close()
        assert sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(before)


async def test_closed_thread_takes_no_call(gate_thread: GateThread) -> None:
    gate_thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        await gate_thread.run(lambda: 7)
