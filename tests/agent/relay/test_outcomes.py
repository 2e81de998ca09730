"""Counts of connections between two reports to the agent."""

from agent.relay.messages import OPEN_BUCKETS, AnswerSample, OutcomeSample
from agent.relay.outcomes import AnswerCounter, OutcomeCounter


def _buckets(**counts: int) -> tuple[int, ...]:
    """The number in each bucket, by its place: at_0=1."""
    return tuple(counts.get(f"at_{place}", 0) for place in range(len(OPEN_BUCKETS)))


def test_outcomes_are_counted_by_target_port_and_outcome_and_reported_once() -> None:
    counter = OutcomeCounter()
    for seconds in (0.0, OPEN_BUCKETS[0], 0.0002, OPEN_BUCKETS[-1], 2.0):
        counter.add("a", 80, "proxied", seconds)
    counter.add("a", 80, "timeout", 0.5)
    counter.add("a", 90, "proxied", 0.0)
    counter.add("b", 80, "proxied", 0.0)
    total = OPEN_BUCKETS[0] + 0.0002 + OPEN_BUCKETS[-1] + 2.0
    assert counter.drain() == (
        # The longest connect is in no bucket.
        OutcomeSample("a", 80, "proxied", 5, total, _buckets(at_0=2, at_1=1, at_10=1)),
        OutcomeSample("a", 80, "timeout", 1, 0.5, _buckets(at_9=1)),
        OutcomeSample("a", 90, "proxied", 1, 0.0, _buckets(at_0=1)),
        OutcomeSample("b", 80, "proxied", 1, 0.0, _buckets(at_0=1)),
    )
    assert counter.drain() == ()


def test_answers_are_counted_by_target_port_and_outcome_and_reported_once() -> None:
    counter = AnswerCounter()
    counter.add("a", 80, "healthy")
    counter.add("a", 80, "stale")
    counter.add("a", 90, "healthy")
    counter.add("a", 80, "healthy")
    assert counter.drain() == (
        AnswerSample("a", 80, "healthy", 2),
        AnswerSample("a", 80, "stale", 1),
        AnswerSample("a", 90, "healthy", 1),
    )
    assert counter.drain() == ()
