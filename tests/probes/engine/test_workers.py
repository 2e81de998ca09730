"""Workers count, wait and hold as the kubelet's do; time here is only a number."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.engine.workers import ContainerInstance, ProbeType, Worker
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.specs import Probe, TcpSocket

GOOD, BAD = ProbeOutcome(ProbeResult.SUCCESS), ProbeOutcome(ProbeResult.FAILURE)
ERROR = ProbeOutcome(ProbeResult.FAILURE, error=True)
STARTUP, READINESS, LIVENESS = ProbeType.STARTUP, ProbeType.READINESS, ProbeType.LIVENESS


class Run:
    """A worker with a container and a clock."""

    def __init__(
        self,
        type: ProbeType = READINESS,
        *,
        started: bool | None = None,
        first_at: float = 0.0,
        period: float = 10.0,
        delay: float = 0.0,
        success: int = 1,
        failure: int = 3,
    ) -> None:
        probe = Probe(TcpSocket(1), delay, 1.0, period, success, failure)
        self.worker = Worker(type, probe, first_at=first_at)
        self.now = 0.0
        self.started = (type is not STARTUP) if started is None else started
        self.see()

    def see(
        self,
        container_id: str = "c1",
        *,
        started_at: float = 0.0,
        running: bool = True,
        restarts: bool = True,
        deleting: bool = False,
        restored: ProbeResult | None = None,
    ) -> None:
        self.worker.observe(
            ContainerInstance(container_id, started_at, running, restarts),
            started=self.started,
            deleting=deleting,
            now=self.now,
            restored=restored,
        )

    def probe(self, *outcomes: ProbeOutcome, takes: float = 0.0) -> float:
        """Run the probes that bring these outcomes; returns when the last has started."""
        began = self.now
        for outcome in outcomes:
            due = self.worker.due
            assert due is not None
            began = self.now = max(self.now, due)
            self.worker.start(self.now)
            self.now += takes
            while self.worker.finish(outcome, self.now):
                self.worker.start(self.now)
        return began

    @property
    def cached(self) -> ProbeResult | None:
        return self.worker.cached

    @property
    def due(self) -> float | None:
        return self.worker.due


@pytest.mark.parametrize(
    ("type", "result"),
    [
        (READINESS, ProbeResult.FAILURE),
        (LIVENESS, ProbeResult.SUCCESS),
        (STARTUP, ProbeResult.UNKNOWN),
    ],
)
def test_initial_result(type: ProbeType, result: ProbeResult) -> None:
    assert Run(type).cached is result


@pytest.mark.parametrize("type", list(ProbeType))
def test_first_probe_is_due_at_once(type: ProbeType) -> None:
    assert Run(type).due == 0.0


def test_nothing_is_due_without_a_container() -> None:
    worker = Worker(READINESS, Probe(TcpSocket(1)), first_at=0.0)
    worker.observe(None, started=True, deleting=False, now=0.0)
    assert (worker.due, worker.cached) == (None, None)


def test_probes_keep_their_rhythm_however_long_they_take() -> None:
    run = Run(period=10.0)
    assert [run.probe(GOOD, takes=0.7) for _ in range(4)] == [0.0, 10.0, 20.0, 30.0]


def test_probe_that_begins_late_does_not_shift_the_rhythm() -> None:
    run = Run(period=10.0)
    run.now = 3.0
    run.probe(GOOD)
    assert run.due == 10.0


def test_probe_longer_than_its_period_is_followed_at_once_by_one() -> None:
    run = Run(period=1.0)
    run.probe(GOOD, takes=3.5)
    assert run.due is not None
    assert run.due <= run.now
    run.probe(GOOD)
    assert run.due == 4.0


def test_probes_of_one_worker_never_overlap() -> None:
    run = Run()
    run.worker.start(0.0)
    assert run.due is None


def test_period_below_the_second() -> None:
    run = Run(period=0.1)
    assert [round(run.probe(GOOD), 6) for _ in range(4)] == [0.0, 0.1, 0.2, 0.3]


@pytest.mark.parametrize("delay", [5.0, 0.25])
def test_initial_delay_counts_from_the_start_of_the_container(delay: float) -> None:
    run = Run(delay=delay)
    run.see(started_at=100.0)
    assert run.due == 100.0 + delay
    run.probe(GOOD)
    assert run.due == 100.0 + delay + 10.0


def test_initial_delay_that_is_over_does_not_count() -> None:
    run = Run(delay=5.0)
    run.see(started_at=-60.0)
    assert run.due == 0.0


def test_failures_below_the_threshold_change_nothing() -> None:
    run = Run(failure=3)
    run.probe(GOOD, BAD, BAD)
    assert run.cached is ProbeResult.SUCCESS


def test_failures_in_a_row_change_the_result_at_the_threshold() -> None:
    run = Run(failure=3)
    run.probe(GOOD, BAD, BAD, BAD)
    assert run.cached is ProbeResult.FAILURE


def test_a_success_between_failures_resets_the_count() -> None:
    run = Run(failure=3)
    run.probe(GOOD, BAD, BAD, GOOD, BAD, BAD)
    assert run.cached is ProbeResult.SUCCESS


def test_success_threshold() -> None:
    run = Run(success=2)
    seen = [run.cached]
    for _ in range(2):
        run.probe(GOOD)
        seen.append(run.cached)
    assert seen == [ProbeResult.FAILURE, ProbeResult.FAILURE, ProbeResult.SUCCESS]


def test_warning_counts_as_success() -> None:
    run = Run()
    run.probe(ProbeOutcome(ProbeResult.WARNING))
    assert run.cached is ProbeResult.SUCCESS


def test_unknown_counts_as_failure() -> None:
    run = Run(failure=1)
    run.probe(GOOD, ProbeOutcome(ProbeResult.UNKNOWN))
    assert run.cached is ProbeResult.FAILURE


def test_prober_error_is_tried_three_times_at_once_and_thrown_away() -> None:
    run = Run(failure=1)
    run.probe(GOOD)
    tries = 0
    run.now = 10.0
    again = True
    while again:
        run.worker.start(run.now)
        tries += 1
        again = run.worker.finish(ERROR, run.now)
    assert (tries, run.cached, run.due) == (3, ProbeResult.SUCCESS, 20.0)


def test_prober_error_does_not_break_a_run_of_failures() -> None:
    run = Run(failure=2)
    run.probe(GOOD, BAD, ERROR, BAD)
    assert run.cached is ProbeResult.FAILURE


def test_result_of_a_later_try_counts() -> None:
    run = Run()
    run.worker.start(0.0)
    assert run.worker.finish(ERROR, run.now)
    run.worker.start(0.0)
    assert not run.worker.finish(GOOD, run.now)
    assert run.cached is ProbeResult.SUCCESS


def test_each_probe_has_three_tries_of_its_own() -> None:
    run = Run()
    run.probe(ERROR)
    run.worker.start(10.0)
    assert run.worker.finish(ERROR, run.now)


@pytest.mark.parametrize("type", [READINESS, LIVENESS])
def test_others_wait_for_startup(type: ProbeType) -> None:
    run = Run(type, started=False)
    assert run.due is None


def test_readiness_is_probed_as_soon_as_the_container_has_started() -> None:
    run = Run(READINESS, started=False)
    run.now, run.started = 33.0, True
    run.see()
    assert run.due == 33.0


def test_liveness_begins_at_its_next_tick_after_startup() -> None:
    run = Run(LIVENESS, started=False)
    run.now, run.started = 33.0, True
    run.see()
    assert run.due == 40.0


def test_startup_is_not_probed_once_started() -> None:
    run = Run(STARTUP)
    run.started = True
    run.see()
    assert run.due is None


@pytest.mark.parametrize("outcomes", [(GOOD,), (BAD, BAD, BAD)])
def test_startup_is_on_hold_after_either_result(outcomes: tuple[ProbeOutcome, ...]) -> None:
    run = Run(STARTUP)
    run.probe(*outcomes)
    assert (run.worker.is_paused, run.due, run.worker.streak) == (True, None, 0)
    assert run.cached is outcomes[0].result


def test_liveness_is_on_hold_after_a_failure_only() -> None:
    run = Run(LIVENESS)
    run.probe(GOOD, BAD, BAD)
    assert not run.worker.is_paused
    run.probe(BAD)
    assert (run.worker.is_paused, run.due, run.cached) == (True, None, ProbeResult.FAILURE)


def test_readiness_is_never_on_hold() -> None:
    run = Run(READINESS)
    run.probe(BAD, BAD, BAD, BAD)
    assert run.due == 40.0


def test_new_container_ends_the_hold_with_the_initial_result() -> None:
    run = Run(LIVENESS)
    run.probe(BAD, BAD, BAD)
    run.now = 23.0
    run.see("c2", started_at=23.0)
    assert (run.worker.is_paused, run.cached, run.due) == (False, ProbeResult.SUCCESS, 30.0)


def test_new_container_makes_readiness_fail_and_be_probed_at_once() -> None:
    run = Run(READINESS)
    run.probe(GOOD)
    run.now = 4.0
    run.see("c2", started_at=4.0)
    assert (run.cached, run.due) == (ProbeResult.FAILURE, 4.0)


def test_first_container_does_not_hurry_a_worker_that_is_to_begin_later() -> None:
    assert Run(READINESS, first_at=0.7).due == 0.7


def test_same_container_changes_nothing() -> None:
    run = Run(READINESS)
    run.probe(GOOD)
    run.now = 4.0
    run.see()
    assert (run.cached, run.due) == (ProbeResult.SUCCESS, 10.0)


def test_container_that_does_not_run_fails_and_is_not_probed() -> None:
    run = Run(LIVENESS)
    run.see(running=False)
    assert (run.cached, run.due, run.worker.over) == (ProbeResult.FAILURE, None, False)


def test_container_that_will_not_run_again_ends_the_worker() -> None:
    run = Run()
    run.see(running=False, restarts=False)
    assert run.worker.over
    run.see("c2")
    assert run.due is None


@pytest.mark.parametrize("type", [LIVENESS, STARTUP])
def test_deletion_ends_liveness_and_startup_with_success(type: ProbeType) -> None:
    run = Run(type)
    run.see(deleting=True)
    assert (run.cached, run.due, run.worker.over) == (ProbeResult.SUCCESS, None, True)


def test_readiness_goes_on_during_deletion() -> None:
    run = Run(READINESS)
    run.probe(GOOD)
    run.see(deleting=True)
    assert run.due == 10.0
    run.probe(BAD, BAD, BAD)
    assert run.cached is ProbeResult.FAILURE


def test_result_that_comes_after_the_end_does_not_count() -> None:
    run = Run(LIVENESS, failure=1)
    run.worker.start(0.0)
    run.see(deleting=True)
    run.worker.finish(BAD, run.now)
    assert run.cached is ProbeResult.SUCCESS


def test_result_from_before_this_process_is_kept() -> None:
    run = Run(READINESS)
    run.see("c2", restored=ProbeResult.SUCCESS)
    assert run.cached is ProbeResult.SUCCESS


def test_trigger_probes_now_and_restarts_the_rhythm() -> None:
    run = Run()
    run.probe(GOOD)
    run.now = 3.0
    run.worker.trigger(3.0)
    assert run.probe(GOOD) == 3.0
    assert run.due == 13.0


def test_trigger_during_a_probe_schedules_one_more() -> None:
    run = Run()
    run.worker.start(0.0)
    run.worker.trigger(0.5)
    run.worker.trigger(0.6)
    run.worker.finish(GOOD, run.now)
    assert run.due == 0.5
    run.now = 1.0
    run.probe(GOOD)
    assert run.due == 10.5


def test_abandoned_probe_counts_for_nothing() -> None:
    run = Run(failure=1)
    run.probe(GOOD)
    run.worker.start(10.0)
    run.worker.abandon()
    assert (run.cached, run.due) == (ProbeResult.SUCCESS, 20.0)


@pytest.mark.parametrize(
    ("late", "due"), [(-0.1, 20.0), (0.0, 20.0), (9.9, 20.0), (10.0, 30.0), (25.0, 40.0)]
)
def test_tick_whose_probe_starts_now_is_over_with_those_missed(late: float, due: float) -> None:
    run = Run(period=10.0)
    run.probe(GOOD)
    run.worker.skip_tick(10.0 + late)
    assert run.due == due


@pytest.mark.parametrize(
    ("type", "outcomes", "paused"),
    [
        # Is it on hold at first, while it is answered, and when it is not any more?
        (STARTUP, (GOOD,), (True, False, True)),
        (STARTUP, (BAD,), (False, False, False)),
        (STARTUP, (BAD, BAD, BAD), (True, False, False)),
        (LIVENESS, (BAD, BAD, BAD), (True, False, False)),
        (READINESS, (GOOD,), (False, False, False)),
    ],
)
def test_probe_that_is_answered_is_not_on_hold(
    type: ProbeType, outcomes: tuple[ProbeOutcome, ...], paused: tuple[bool, ...]
) -> None:
    """Once it is no more, only one of a container that has started is."""
    run = Run(type)
    run.probe(*outcomes)
    seen = [run.worker.is_paused]
    for answered in (True, False):
        probe = msgspec.structs.replace(run.worker.probe, answered=answered)
        run.worker.change(probe, run.now)
        seen.append(run.worker.is_paused)
    assert seen == list(paused)
    assert run.due == (None if paused[-1] else run.now)


@given(
    st.lists(st.sampled_from([GOOD, BAD, ERROR]), max_size=60),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_result_changes_only_after_a_full_run(
    outcomes: list[ProbeOutcome], success: int, failure: int
) -> None:
    run = Run(success=success, failure=failure)
    expected, kind, length = ProbeResult.FAILURE, None, 0
    for outcome in outcomes:
        run.probe(outcome)
        if not outcome.error:
            length = length + 1 if outcome.result is kind else 1
            kind = outcome.result
            if length >= (success if kind is ProbeResult.SUCCESS else failure):
                expected = kind
        assert run.cached is expected


@given(st.floats(0.001, 100), st.floats(0, 1e9), st.lists(st.floats(0, 1000), max_size=30))
def test_probes_are_never_due_in_the_past_twice(
    period: float, first_at: float, takes: list[float]
) -> None:
    run = Run(period=period, first_at=first_at)
    last = -1.0
    for seconds in takes:
        began = run.probe(GOOD, takes=seconds)
        assert began > last
        last = began


def test_a_day_of_probing_keeps_the_rhythm() -> None:
    run = Run(period=0.1)
    for _ in range(864_000 // 10):
        run.probe(GOOD)
    assert run.due == pytest.approx(8640.0, abs=1e-6)
