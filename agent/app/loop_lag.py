"""How late the event loop runs what is due: all of the agent's waits are that much longer."""

import asyncio
from collections.abc import Iterable

from prometheus_client import core

from agent import tasks
from agent.metrics import MetricFamily, histogram

# At the tick of all others, so it measures how long these take together, too.
_PERIOD_SECONDS = 1.0
# A timer's own rounding is 1 ms; the agent exits after --watchdog-seconds.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)

LAG = MetricFamily(
    "podgate_event_loop_lag_seconds",
    "histogram",
    "Delay between a timer of the event loop and its call, measured once a second.",
)


class LoopLag:
    """Measures it while `run` runs."""

    def __init__(self) -> None:
        self._lag = histogram(LAG, _BUCKETS)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = tasks.next_tick(_PERIOD_SECONDS)
            await asyncio.sleep(due - loop.time())
            self._lag.observe(max(0.0, loop.time() - due))

    def collect(self) -> Iterable[core.Metric]:
        return self._lag.collect()
