"""The newest durations of each probe."""

from agent.probing.recent import RecentProbes
from probes.engine.scheduler import ProbeKey
from probes.engine.workers import ProbeType
from probes.results import ProbeOutcome, ProbeResult

KEY = ProbeKey("uid", "app", ProbeType.READINESS)


def outcome(milliseconds: float, result: ProbeResult = ProbeResult.SUCCESS) -> ProbeOutcome:
    return ProbeOutcome(result, duration_seconds=milliseconds / 1000)


def test_durations_are_in_order_and_failures_have_none() -> None:
    recent = RecentProbes()
    recent.add(KEY, outcome(1.5))
    recent.add(KEY, outcome(9.0, ProbeResult.FAILURE))
    recent.add(KEY, outcome(2.25))
    assert recent.of(KEY) == [1.5, None, 2.25]


def test_durations_of_lookups_are_among_them() -> None:
    recent = RecentProbes()
    recent.add(KEY, outcome(1.5))
    recent.add_successes(KEY, [0.0001, 0.00025])
    recent.add(KEY, outcome(2.25))
    assert recent.of(KEY) == [1.5, 0.1, 0.25, 2.25]


def test_only_the_newest_are_kept() -> None:
    recent = RecentProbes()
    for number in range(100):
        recent.add(KEY, outcome(number))
    assert recent.of(KEY) == list(range(70, 100))


def test_removed_pod_is_forgotten() -> None:
    recent = RecentProbes()
    recent.add(KEY, outcome(1))
    recent.forget("uid")
    assert recent.of(KEY) == []
