"""Metrics of pods added up: by namespace, or by node.

A cluster of 200 nodes with 110 pods each has a million series of pods. What is added up stays a
counter: a pod that ends takes its series away, so what its series had counted last is kept.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import core, registry

from agent.settings import MetricsLevel

_OF_PODS = ("pod", "pod_uid", "container", "interface")
_POD = "pod"
_DROPPED = {
    MetricsLevel.NODE: ("namespace", *_OF_PODS),
    MetricsLevel.NAMESPACE: _OF_PODS,
    MetricsLevel.POD: (),
}
"""Labels that metrics of pods lack."""

_Series = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""


class LevelledCollector:
    """What another collector has, without series of pods."""

    def __init__(self, collector: registry.Collector, level: MetricsLevel) -> None:
        self._collector = collector
        self._dropped = frozenset(_DROPPED[level])
        self._totals: dict[str, _Totals] = defaultdict(_Totals)
        """Of counters and histograms, by the metric's name."""

    def collect(self) -> Iterator[core.Metric]:
        for metric in self._collector.collect():
            yield self._added(metric) if _is_of_pods(metric) else metric

    def _added(self, metric: core.Metric) -> core.Metric:
        samples = [(_series(one.name, one.labels), one.value) for one in metric.samples]
        if metric.type == "gauge":
            found: dict[_Series, float] = defaultdict(float)
            for series, value in samples:
                found[self._group(series)] += value
        else:
            found = self._totals[metric.name].update(
                (series, self._group(series), value) for series, value in samples
            )
        made = core.Metric(metric.name, metric.documentation, metric.type, metric.unit)
        for (name, labels), value in found.items():
            made.add_sample(name, dict(labels), value)
        return made

    def _group(self, series: _Series) -> _Series:
        name, labels = series
        return name, tuple(one for one in labels if one[0] not in self._dropped)


class _Totals:
    """Sums that do not fall when one of their series ends."""

    def __init__(self) -> None:
        self._last: dict[_Series, tuple[_Series, float]] = {}
        self._ended: dict[_Series, float] = {}
        """What series that ended had counted, by group, of groups that have others."""

    def update(self, samples: Iterable[tuple[_Series, _Series, float]]) -> dict[_Series, float]:
        """The sum of each group. samples: each with its series and its group."""
        current = {series: (group, value) for series, group, value in samples}
        for series, (group, value) in self._last.items():
            # A series that begins again counts from zero.
            if series not in current or current[series][1] < value:
                self._ended[group] = self._ended.get(group, 0.0) + value
        self._last = current
        sums: dict[_Series, float] = defaultdict(float)
        for group, value in current.values():
            sums[group] += value
        self._ended = {group: value for group, value in self._ended.items() if group in sums}
        for group, value in self._ended.items():
            sums[group] += value
        return sums


def _is_of_pods(metric: core.Metric) -> bool:
    return any(_POD in one.labels for one in metric.samples)


def _series(name: str, labels: Mapping[str, str]) -> _Series:
    return name, tuple(sorted(labels.items()))
