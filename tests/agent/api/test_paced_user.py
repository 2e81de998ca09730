"""The pace of one user: what it may send at once and in the long run."""

import asyncio

import pytest

from agent.api.paced_user import Pace, PacedUser
from agent.api.proxied_connection import RequestCounter
from tests.agent.api import flood

pytestmark = pytest.mark.looptime
PACE = Pace(
    requests_per_second=10, requests_burst=20, connections_per_second=1, connections_burst=5
)


def may_connect(user: PacedUser) -> bool:
    return user.may_connect


class Reader:
    """A connection of the user, and when it was read."""

    def __init__(self, user: PacedUser) -> None:
        self.user = user
        self.is_read = True
        user.readers.add(self)

    def update_reading(self) -> None:
        self.is_read = not self.user.is_paused


async def test_user_within_its_pace_is_never_paused() -> None:
    user = PacedUser(0, PACE)
    for _ in range(500):
        user.sent(1, 100)
        await asyncio.sleep(0.1)
    assert user.pauses == 0


async def test_flooding_user_sends_its_burst_and_then_its_pace() -> None:
    user = PacedUser(0, PACE)
    readers = [Reader(user), Reader(user)]
    requests = 0
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() - began < 100:
        if all(reader.is_read for reader in readers):
            user.sent(5, 500)
            requests += 5
        else:
            # None of them is read meanwhile.
            assert not any(reader.is_read for reader in readers)
            await asyncio.sleep(0.01)
    assert 900 <= requests <= 20 + 100 * 10 + 5


async def test_octets_are_paced_without_requests() -> None:
    user = PacedUser(0, PACE)
    reader = Reader(user)
    octets = 0
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() - began < 100:
        if reader.is_read:
            user.sent(0, 4096)
            octets += 4096
        else:
            await asyncio.sleep(0.01)
    assert octets < (256 << 10) + 100 * (128 << 10) + 4096


async def test_reader_of_much_may_acknowledge_it() -> None:
    """A client that receives 100 kB in each message sends a window update and a ping for it."""
    user = PacedUser(0, PACE)
    for _ in range(10_000):
        user.received(50_000)
        user.received(50_000)
        user.sent(0, 13 + 17)
    assert user.pauses == 0


async def test_writes_alone_lead_to_no_long_pause() -> None:
    user = PacedUser(0, PACE)
    reader = Reader(user)
    for _ in range(1_000_000):
        user.received(10)
    user.sent(0, 10)
    assert not reader.is_read
    await asyncio.sleep(1.1)
    assert reader.is_read


async def test_only_connections_that_close_soon_are_limited() -> None:
    user = PacedUser(0, PACE)
    for _ in range(1000):
        user.connected()
    assert may_connect(user)
    await asyncio.sleep(60)
    for _ in range(1000):
        user.disconnected(60.0)
    assert may_connect(user)
    for _ in range(5):
        user.connected()
        user.disconnected(0.1)
    assert not may_connect(user)
    await asyncio.sleep(1.1)
    assert may_connect(user)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9, 10, 23, 24, 25, 33, 64, 1000])
async def test_requests_are_counted_however_octets_are_cut(size: int) -> None:
    sent = flood.GREETING + b"".join(
        flood.request(number) + flood.ping(number) + flood.settings(number)
        for number in range(1, 41, 2)
    )
    counter = RequestCounter()
    cut = [sent[start : start + size] for start in range(0, len(sent), size)]
    assert sum(counter.feed(one) for one in cut) == 20
