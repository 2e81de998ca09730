"""Pods that change all the time wait, and no other pod does."""

import asyncio

import pytest

from agent.pods.changes import Subscription
from agent.pods.pacing import _AT_ONCE, PacedMarks


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
def marks() -> Subscription:
    return Subscription()


@pytest.mark.looptime
async def test_pod_that_changes_all_the_time_waits_and_another_does_not(
    marks: Subscription,
) -> None:
    paced = PacedMarks(marks)
    for _ in range(_AT_ONCE):
        paced.mark("busy")
        assert marks.take() == ["busy"]
    marks.changed.clear()
    paced.mark("busy")
    paced.mark("calm")
    assert marks.take() == ["calm"]
    assert marks.changed.is_set()
    due = paced.mark_due()
    assert due == now() + 0.5
    assert marks.take() == []


@pytest.mark.looptime
async def test_last_change_is_marked_once_when_it_is_due(marks: Subscription) -> None:
    paced = PacedMarks(marks)
    for _ in range(_AT_ONCE + 3):
        paced.mark("busy")
    marks.take()
    await asyncio.sleep(0.5)
    assert paced.mark_due() is None
    assert marks.take() == ["busy"]
    paced.mark("busy")
    assert marks.take() == []
    # It has doubled.
    assert paced.mark_due() == now() + 1


@pytest.mark.looptime
async def test_pod_that_is_gone_is_not_marked_and_its_uid_starts_again(
    marks: Subscription,
) -> None:
    paced = PacedMarks(marks)
    for _ in range(_AT_ONCE + 1):
        paced.mark("busy")
    marks.take()
    paced.forget("busy")
    paced.forget("never seen")
    assert paced.mark_due() is None
    for _ in range(_AT_ONCE):
        paced.mark("busy")
        assert marks.take() == ["busy"]
    paced.mark("busy")
    assert marks.take() == []
