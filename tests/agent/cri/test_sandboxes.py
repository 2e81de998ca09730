"""How often the sandboxes of a runtime are listed."""

import asyncio
from typing import Any

import pytest

from agent.cri.client import CriError
from agent.cri.sandboxes import Sandboxes

pytestmark = pytest.mark.looptime


async def unused(*_: object) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("has_events", "problem", "seconds"),
    [(False, "", 1), (True, "", 10), (True, "it does not respond", 1)],
)
async def test_lists_of_a_runtime_that_sends_events_are_rare(
    monkeypatch: pytest.MonkeyPatch, has_events: bool, problem: str, seconds: float
) -> None:
    monkeypatch.setattr(Sandboxes, "has_events", has_events)
    sandboxes = Sandboxes(unused, unused)
    sandboxes.problem = problem
    now = asyncio.get_running_loop().time
    before = now()
    await sandboxes._wait()
    assert now() - before == pytest.approx(seconds, abs=0.01)


async def test_hint_is_followed_at_once_but_not_more_than_ten_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sandboxes, "has_events", True)
    sandboxes = Sandboxes(unused, unused)
    sandboxes.problem = ""
    now = asyncio.get_running_loop().time
    before = now()
    asyncio.get_running_loop().call_later(3, sandboxes.hint)
    await sandboxes._wait()
    assert now() - before == pytest.approx(3, abs=0.01)
    before = now()
    sandboxes._echoes.clear()
    sandboxes.hint()
    await sandboxes._wait()
    assert now() - before == pytest.approx(0.1, abs=0.01)


async def test_runtime_that_cannot_be_reached_is_tried_at_intervals_while_a_pod_is_awaited() -> (
    None
):
    attempts = 0

    async def fail() -> Any:
        nonlocal attempts
        attempts += 1
        raise CriError("no such file")

    sandboxes = Sandboxes(fail, unused, is_awaited=lambda: True)
    task = asyncio.create_task(sandboxes.run())
    sandboxes.hint()
    await asyncio.sleep(10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Once a second, and after the hint and its echoes.
    assert 10 <= attempts <= 15
