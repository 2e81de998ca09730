"""Token buckets and retry delays, in fake time."""

import asyncio

import pytest

from agent.backoff import Backoff, Bucket, Pace, no_jitter


def test_delays_double_up_to_the_cap() -> None:
    backoff = Backoff(base_seconds=0.5, cap_seconds=3.0, jitter=no_jitter)
    assert [backoff.next_seconds() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_reset_starts_from_the_base() -> None:
    backoff = Backoff(base_seconds=1.0, cap_seconds=60.0, jitter=no_jitter)
    backoff.next_seconds()
    backoff.next_seconds()
    assert backoff.failures == 2
    backoff.reset()
    assert (backoff.failures, backoff.next_seconds()) == (0, 1.0)


@pytest.mark.parametrize(("random", "seconds"), [(0.0, 2.0), (0.5, 4.0), (0.999, 5.996)])
def test_jitter_is_half_to_one_and_a_half_of_the_delay(random: float, seconds: float) -> None:
    backoff = Backoff(base_seconds=4.0, cap_seconds=60.0, jitter=lambda: random)
    assert backoff.next_seconds() == pytest.approx(seconds)


def test_thousands_of_failures_stay_at_the_cap() -> None:
    backoff = Backoff(base_seconds=1.0, cap_seconds=30.0, jitter=no_jitter)
    assert {backoff.next_seconds() for _ in range(5000)} >= {30.0}
    assert backoff.next_seconds() == 30.0


@pytest.mark.looptime
async def test_bucket_admits_a_burst_and_then_its_rate() -> None:
    loop = asyncio.get_running_loop()
    bucket = Bucket(per_second=2.0, burst=3)
    start = loop.time()
    times = []
    for _ in range(6):
        await bucket.wait()
        times.append(loop.time() - start)
    assert times == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 1.5])


@pytest.mark.looptime
async def test_bucket_refills_to_no_more_than_the_burst() -> None:
    bucket = Bucket(per_second=1.0, burst=2)
    await bucket.wait()
    await asyncio.sleep(100)
    bucket.take()
    bucket.take()
    assert bucket.seconds_until_next() == pytest.approx(1.0)


def test_pace_slows_down_what_happens_all_the_time_and_forgives_a_pause() -> None:
    pace = Pace(at_once=2, base_seconds=1.0, cap_seconds=4.0)
    now, delays = 100.0, []
    for _ in range(7):
        due = pace.happened(now)
        delays.append(due - now)
        pace.handled(due)
        now = due
    assert delays == [0.0, 0.0, 1.0, 2.0, 4.0, 4.0, 4.0]
    # What happened meanwhile counts, too: it starts again a pause after it.
    assert pace.happened(now + 3.9) == now + 4.0
    pace.handled(now + 4.0)
    assert pace.happened(now + 7.8) == now + 8.0
    assert pace.happened(now + 11.8) == now + 11.8
    pace.handled(now + 11.8)
    assert pace.happened(now + 11.9) == now + 11.9
