"""How metrics are declared. Each owner of figures is a collector, which the agent registers.

Every family is in docs/reference/metrics.md, which is made from the declarations.
"""

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
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _declared[self.name] = self


def families() -> list[MetricFamily]:
    """All families that imported modules declare, by name."""
    return [_declared[name] for name in sorted(_declared)]


def new_metric(family: MetricFamily) -> core.CounterMetricFamily | core.GaugeMetricFamily:
    """A metric to be filled at scrape time."""
    kind = core.CounterMetricFamily if family.kind == "counter" else core.GaugeMetricFamily
    return kind(family.name, family.help, labels=family.labels)


def single(family: MetricFamily, value: float) -> core.Metric:
    """A metric of one sample without labels."""
    metric = new_metric(family)
    metric.add_metric((), value)
    return metric


def counter(family: MetricFamily) -> prometheus_client.Counter:
    """A counter that its owner increments and collects."""
    return prometheus_client.Counter(family.name, family.help, family.labels, registry=None)


def histogram(family: MetricFamily, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
    """A histogram that its owner fills and collects."""
    return prometheus_client.Histogram(
        family.name, family.help, family.labels, buckets=buckets, registry=None
    )
