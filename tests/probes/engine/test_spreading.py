"""New probes of a full node begin spread over an interval, and never late."""

import itertools

from probes.engine.spreading import Spread


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_probes_begin_evenly_within_the_interval() -> None:
    spread = Spread(Clock(), 10.0)
    starts = sorted(spread.next() for _ in range(100))
    assert 100 <= starts[0] < 100.5
    assert 109.5 < starts[-1] < 110
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert max(gaps) < 0.3


def test_probes_that_come_late_share_the_rest_and_those_after_it_begin_at_once() -> None:
    clock = Clock()
    spread = Spread(clock, 10.0)
    clock.now = 108.0
    assert all(108 <= spread.next() < 110 for _ in range(20))
    for clock.now in (110.0, 111.0):
        assert spread.next() == clock.now


def test_without_an_interval_probes_begin_at_once() -> None:
    assert Spread(Clock(), 0).next() == 100.0
