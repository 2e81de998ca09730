"""Alarms wake each run at its time, with one timer for all."""

import asyncio
import itertools

import pytest

from probes.engine.alarms import Alarms

pytestmark = pytest.mark.looptime


class Run:
    """Records when it is woken."""

    def __init__(self) -> None:
        self.woken: list[float] = []

    def wake(self) -> None:
        self.woken.append(asyncio.get_running_loop().time())


class Failing(Run):
    def wake(self) -> None:
        super().wake()
        raise RuntimeError("of this run alone")


@pytest.fixture
async def alarms() -> Alarms:
    return Alarms(asyncio.get_running_loop())


async def test_each_run_is_woken_once_at_its_time(alarms: Alarms) -> None:
    now = asyncio.get_running_loop().time()
    late, early, removed = Run(), Run(), Run()
    alarms.set(late, now + 20)
    alarms.set(removed, now + 10)
    alarms.set(early, now + 5)
    alarms.remove(removed)
    await asyncio.sleep(60)
    assert [round(at - now, 3) for at in early.woken + late.woken] == [5, 20]
    assert removed.woken == []


async def test_newest_time_of_a_run_counts(alarms: Alarms) -> None:
    now = asyncio.get_running_loop().time()
    run = Run()
    alarms.set(run, now + 5)
    alarms.set(run, now + 30)
    await asyncio.sleep(60)
    assert [round(at - now, 3) for at in run.woken] == [30]


async def test_failing_run_stops_no_other(alarms: Alarms) -> None:
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    runs = [Failing(), Run(), Failing(), Run()]
    for number, run in enumerate(runs):
        alarms.set(run, loop.time() + 5 + number // 2)
    await asyncio.sleep(60)
    assert [len(run.woken) for run in runs] == [1, 1, 1, 1]
    assert len(failures) == 2


async def test_many_at_one_time_leave_the_loop_to_others_in_between(alarms: Alarms) -> None:
    loop = asyncio.get_running_loop()
    runs = [Run() for _ in range(100)]
    for run in runs:
        alarms.set(run, loop.time() + 5)
    woken = [0]
    await asyncio.sleep(5)
    for _ in runs:
        woken.append(sum(len(run.woken) for run in runs))
        await asyncio.sleep(0)
    assert max(after - before for before, after in itertools.pairwise(woken)) < 40
    assert all(len(run.woken) == 1 for run in runs)


async def test_many_runs_that_end_before_use_one_timer(alarms: Alarms) -> None:
    loop = asyncio.get_running_loop()
    for number in range(1000):
        run = Run()
        alarms.set(run, loop.time() + 10 + number)
        alarms.remove(run)
    scheduled = loop._scheduled  # type: ignore[attr-defined]
    assert len(scheduled) == 1


async def test_closed_alarms_wake_no_run(alarms: Alarms) -> None:
    run = Run()
    alarms.set(run, asyncio.get_running_loop().time() + 5)
    alarms.close()
    await asyncio.sleep(60)
    assert run.woken == []
