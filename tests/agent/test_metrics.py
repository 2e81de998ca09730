"""Metrics as Prometheus reads them, by the kind that their family declares."""

import prometheus_client
import pytest
from prometheus_client import core

from agent import metrics
from agent.metrics import MetricFamily


class Collected:
    """A collector of one metric."""

    def __init__(self, metric: core.Metric) -> None:
        self._metric = metric

    def collect(self) -> list[core.Metric]:
        return [self._metric]


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> MetricFamily:
    monkeypatch.setattr(metrics, "_declared", {})
    return MetricFamily("x", request.param, "What is counted.", ("pod",))


@pytest.mark.parametrize(
    ("family", "kind", "name"),
    [("counter", "counter", "x_total"), ("gauge", "gauge", "x"), ("untyped", "untyped", "x")],
    indirect=["family"],
)
def test_series_have_the_kind_of_their_family(family: MetricFamily, kind: str, name: str) -> None:
    registry = prometheus_client.CollectorRegistry()
    found = metrics.labelled(family, [(("web",), 2.0), (("db",), 3.0)])
    registry.register(Collected(found))
    assert prometheus_client.generate_latest(registry).decode().splitlines() == [
        f"# HELP {name} What is counted.",
        f"# TYPE {name} {kind}",
        f'{name}{{pod="web"}} 2.0',
        f'{name}{{pod="db"}} 3.0',
    ]
    assert metrics.families() == [family]


@pytest.mark.parametrize("amounts", [(0.5, 0.25), (0.5, 1.0, 7.0), (9.0,)])
@pytest.mark.parametrize("family", ["histogram"], indirect=True)
def test_amounts_that_are_observed_together_are_each_in_their_bucket(
    family: MetricFamily, amounts: tuple[float, ...]
) -> None:
    together, single = (
        metrics.histogram(MetricFamily(name, "histogram", ""), (0.5, 1, 5)) for name in ("y", "y")
    )
    together.observe_all(amounts)
    for amount in amounts:
        single.observe(amount)
    values = [
        [(one.labels, one.value) for metric in found.collect() for one in metric.samples[:-1]]
        for found in (together, single)
    ]
    assert values[0] == values[1]
