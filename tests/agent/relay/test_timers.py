"""The relay's timers: due together, and with events that come shortly before."""

import collections

import pytest

from agent.relay.timers import EARLY_SECONDS, Timers


class Clock:
    """Time that passes only by assignment."""

    def __init__(self) -> None:
        self.seconds = 100.02

    def __call__(self) -> float:
        return self.seconds


class Running:
    """Timers with these periods, and how often each ran."""

    def __init__(self, **seconds: float) -> None:
        self.clock = Clock()
        self.runs = collections.Counter[str]()
        self.calls = {name: self._call(name) for name in seconds}
        periods = {self.calls[name]: period for name, period in seconds.items()}
        self.timers = Timers(periods, self.clock)
        self.timers.run()
        self.wakeups = 0

    def _call(self, name: str) -> "collections.abc.Callable[[], None]":
        return lambda: self.runs.update([name])

    def rest(self, seconds: float) -> None:
        """Wake for timers alone."""
        end = self.clock.seconds + seconds
        while self.timers.next_due() < end:
            self.clock.seconds = self.timers.next_due()
            self.timers.run()
            self.wakeups += 1
        self.clock.seconds = end


def test_timers_are_due_together_at_the_pace_of_each() -> None:
    running = Running(beat=0.125, expire=0.25, report=1.0)
    assert running.runs == {"beat": 1, "expire": 1, "report": 1}
    running.rest(10)
    assert running.wakeups == 80
    assert running.runs == {"beat": 81, "expire": 41, "report": 11}


@pytest.mark.parametrize("period", [0.05, 0.125, 0.25])
def test_events_at_any_time_delay_no_timer_and_repeat_none(period: float) -> None:
    running = Running(beat=period)
    last = running.clock.seconds
    for _ in range(5_000):
        running.clock.seconds += 0.0007
        if running.clock.seconds < running.timers.next_due() - EARLY_SECONDS:
            continue
        before = running.runs["beat"]
        running.timers.run()
        assert running.runs["beat"] == before + 1
        assert running.clock.seconds - last <= period + EARLY_SECONDS
        last = running.clock.seconds
    assert running.runs["beat"] == pytest.approx(3.5 / period, abs=2)


def test_event_shortly_before_a_timer_saves_its_wakeup() -> None:
    running = Running(beat=0.125, report=1.0)
    running.rest(0.9)
    running.clock.seconds = 101.0  # the agent's tick
    assert running.timers.next_due() - running.clock.seconds < EARLY_SECONDS
    running.timers.run()
    assert running.timers.next_due() - running.clock.seconds > 0.125


def test_late_timer_is_noticed_and_followed_by_the_next_one_in_time() -> None:
    running = Running(beat=0.125)
    assert running.timers.late_seconds == 0
    running.rest(1)
    assert running.timers.late_seconds == 0
    due = running.timers.next_due()
    running.clock.seconds = due + 0.2
    running.timers.run()
    assert running.timers.late_seconds == pytest.approx(0.2)
    assert 0 < running.timers.next_due() - running.clock.seconds < 0.125


def test_period_that_a_timer_changes_is_in_force_from_its_next_time_on() -> None:
    running = Running(beat=0.125)
    running.timers.set_period(running.calls["beat"], 0.05)
    running.rest(10)
    assert running.runs["beat"] == pytest.approx(200, abs=2)
