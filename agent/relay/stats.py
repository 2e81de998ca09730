"""How connections ended, since the agent was told last."""

import bisect
import dataclasses

from agent.relay.messages import OPEN_BUCKETS, Outcome, Sample


@dataclasses.dataclass(slots=True)
class _Count:
    count: int = 0
    open_seconds: float = 0.0
    # The last is for what took longer than all bounds.
    buckets: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(OPEN_BUCKETS) + 1))


class Tally:
    """Counts by target, port and outcome."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, Outcome], _Count] = {}

    def add(self, key: str, port: int, outcome: Outcome, open_seconds: float) -> None:
        """key: of the target, "" without one; open_seconds: 0 where nothing was tried."""
        count = self._counts.get((key, port, outcome))
        if count is None:
            count = self._counts[key, port, outcome] = _Count()
        count.count += 1
        count.open_seconds += open_seconds
        count.buckets[bisect.bisect_left(OPEN_BUCKETS, open_seconds)] += 1

    def take(self) -> tuple[Sample, ...]:
        """All since it was called last."""
        samples = tuple(
            Sample(key, port, outcome, one.count, one.open_seconds, tuple(one.buckets[:-1]))
            for (key, port, outcome), one in self._counts.items()
        )
        self._counts.clear()
        return samples
