"""Limits per user: each has its own, and of many users those that called last are kept."""

import asyncio

import pytest

from agent.api import rate_limits
from agent.api.rate_limits import UserRates, UserSlots

pytestmark = pytest.mark.looptime


async def test_each_user_has_its_burst_and_then_its_rate() -> None:
    rates = UserRates(per_second=2.0, burst=3)
    assert [rates.take(1) for _ in range(5)] == [True, True, True, False, False]
    assert rates.take(2)
    await asyncio.sleep(0.6)
    assert [rates.take(1) for _ in range(2)] == [True, False]
    assert [rates.take(2) for _ in range(4)] == [True, True, True, False]
    assert rates.users == [1, 2]


async def test_users_that_called_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "_MAX_USERS", 2)
    rates = UserRates(per_second=1.0, burst=1)
    for user in (1, 2, 1, 3):
        rates.take(user)
    assert rates.users == [1, 3]
    # A user who was dropped starts again, the others do not.
    assert [rates.take(user) for user in (1, 3, 2)] == [False, False, True]


def test_slots_are_counted_by_user_and_free_afterwards() -> None:
    slots = UserSlots(2)
    with slots.hold(1):
        assert (slots.has_room(1), slots.total) == (True, 1)
        with slots.hold(1), slots.hold(2):
            assert (slots.has_room(1), slots.has_room(2), slots.total) == (False, True, 3)
        assert (slots.has_room(1), slots.total) == (True, 1)
        with pytest.raises(OSError, match="no"), slots.hold(1):
            raise OSError("no")
        assert slots.total == 1
    assert slots.total == 0
    assert 1 not in slots._open
