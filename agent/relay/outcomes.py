"""Outcomes of connections, counted between two reports to the agent."""

import bisect
import collections
import dataclasses

from agent.relay.messages import (
    OPEN_BUCKETS,
    AnswerOutcome,
    AnswerSample,
    Outcome,
    OutcomeSample,
)


@dataclasses.dataclass(slots=True)
class _Count:
    count: int = 0
    open_seconds: float = 0.0
    # The last bucket is for times above all bounds.
    buckets: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(OPEN_BUCKETS) + 1))


class OutcomeCounter:
    """Counts by target, port and outcome."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, Outcome], _Count] = {}

    def add(self, key: str, port: int, outcome: Outcome, open_seconds: float) -> None:
        """key: of the target, "" without one; open_seconds: 0 if no connect was tried."""
        count = self._counts.get((key, port, outcome))
        if count is None:
            count = self._counts[key, port, outcome] = _Count()
        count.count += 1
        count.open_seconds += open_seconds
        count.buckets[bisect.bisect_left(OPEN_BUCKETS, open_seconds)] += 1

    def drain(self) -> tuple[OutcomeSample, ...]:
        """All counts since the last call."""
        samples = tuple(
            OutcomeSample(
                key, port, outcome, count.count, count.open_seconds, tuple(count.buckets[:-1])
            )
            for (key, port, outcome), count in self._counts.items()
        )
        self._counts.clear()
        return samples


class AnswerCounter:
    """Counts connections to ports with answers, by target, port and outcome."""

    def __init__(self) -> None:
        self._counts: collections.Counter[tuple[str, int, AnswerOutcome]] = collections.Counter()

    def add(self, key: str, port: int, outcome: AnswerOutcome) -> None:
        """key: of the target."""
        self._counts[key, port, outcome] += 1

    def drain(self) -> tuple[AnswerSample, ...]:
        """All counts since the last call."""
        samples = tuple(
            AnswerSample(key, port, outcome, count)
            for (key, port, outcome), count in self._counts.items()
        )
        self._counts.clear()
        return samples
