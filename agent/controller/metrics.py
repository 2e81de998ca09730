"""Metrics of the controller."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import prometheus_client
from prometheus_client import core, registry

from agent.metrics import MetricFamily, single

_LEADING: Final = MetricFamily(
    "podgate_controller_leading",
    "gauge",
    "Whether this replica of the controller holds the Lease and writes.",
)


class _Leadership(registry.Collector):
    def __init__(self, is_leading: Callable[[], bool]) -> None:
        self._is_leading = is_leading

    def collect(self) -> Iterator[core.Metric]:
        yield single(_LEADING, self._is_leading())


def new_registry(
    is_leading: Callable[[], bool], collectors: Iterable[registry.Collector] = ()
) -> prometheus_client.CollectorRegistry:
    """All metrics of one replica."""
    made = prometheus_client.CollectorRegistry()
    for collector in (_Leadership(is_leading), *collectors):
        made.register(collector)
    prometheus_client.ProcessCollector(registry=made)
    return made
