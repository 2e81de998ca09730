"""How metrics are declared. Each owner of figures is a collector, which the agent registers.

Every family is in docs/reference/metrics.md, which is made from the declarations.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import prometheus_client
from prometheus_client import core

# A "_created" series for each other one would double what is stored.
prometheus_client.disable_created_metrics()

_declared: dict[str, "MetricFamily"] = {}


class MetricFamily(msgspec.Struct, frozen=True):
    """The declaration of one metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "untyped"]
    """untyped: named by others, who give counters no suffix."""
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _declared[self.name] = self


def families() -> list[MetricFamily]:
    """All families that imported modules declare, by name."""
    return [_declared[name] for name in sorted(_declared)]


Labels = tuple[str, ...]
"""Values of a family's labels, in its order."""


def labelled(family: MetricFamily, samples: Iterable[tuple[Labels, float]]) -> core.Metric:
    """A metric with one sample for each set of labels."""
    if family.kind == "untyped":
        metric = core.Metric(family.name, family.help, "unknown")
        for values, value in samples:
            labels = dict(zip(family.labels, values, strict=True))
            metric.add_sample(family.name, labels, value)
        return metric
    kind = core.CounterMetricFamily if family.kind == "counter" else core.GaugeMetricFamily
    found = kind(family.name, family.help, labels=family.labels)
    for values, value in samples:
        found.add_metric(values, value)
    return found


def single(family: MetricFamily, value: float) -> core.Metric:
    """A metric of one sample without labels."""
    return labelled(family, [((), value)])


def counter(family: MetricFamily) -> prometheus_client.Counter:
    """A counter that its owner increments and collects."""
    return prometheus_client.Counter(family.name, family.help, family.labels, registry=None)


class Histogram(prometheus_client.Histogram):
    """Also observes many amounts at once: one by one, each takes 3 us."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """As `observe` with each; at least one."""
        self._sum.inc(sum(amounts))
        first, last = (bisect_left(self._upper_bounds, end(amounts)) for end in (min, max))
        if first == last:
            self._buckets[first].inc(len(amounts))
            return
        for amount in amounts:
            self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)


def histogram(family: MetricFamily, buckets: tuple[float, ...]) -> Histogram:
    """A histogram that its owner fills and collects."""
    return Histogram(family.name, family.help, family.labels, buckets=buckets, registry=None)
