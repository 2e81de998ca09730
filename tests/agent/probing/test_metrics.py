"""Probes and listeners as Prometheus sees them; a pod's series end with the pod."""

import prometheus_client
from prometheus_client import registry

from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.probing.metrics import ProbeMetrics

POD = Pod(uid="u", namespace="shop", name="web")
OTHER = Pod(uid="v", namespace="shop", name="web2")


class _Shown(registry.Collector):
    def __init__(self, metrics: ProbeMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> list[prometheus_client.Metric]:
        return list(self._metrics.collect(in_flight=3, queued=4))


def metrics_of(*pods: Pod) -> ProbeMetrics:
    store = PodStore(Conditions())
    for pod in pods:
        store.set_pod(pod)
    return ProbeMetrics(store)


def lines(metrics: ProbeMetrics) -> list[str]:
    shown = prometheus_client.CollectorRegistry()
    shown.register(_Shown(metrics))
    text = prometheus_client.generate_latest(shown).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_probes_are_counted_with_the_kubelets_labels() -> None:
    metrics = metrics_of(POD)
    metrics.count_probe(
        POD, container="app", probe_type="Readiness", result="successful", seconds=0.002
    )
    shown = lines(metrics)
    labels = (
        'container="app",namespace="shop",pod="web",pod_uid="u"'
        ',probe_type="Readiness",result="successful"'
    )
    assert f"prober_probe_total{{{labels}}} 1.0" in shown
    assert any(line.startswith("prober_probe_duration_seconds_bucket{") for line in shown)


def test_series_of_a_pod_vanish_with_it_and_others_stay() -> None:
    metrics = metrics_of(OTHER)
    for pod in (POD, OTHER):
        metrics.count_probe(
            pod, container="app", probe_type="Readiness", result="failed", seconds=1.0
        )
        metrics.unwatched_listeners[pod.uid] = 2
    metrics.forget(POD)
    shown = "\n".join(lines(metrics))
    assert 'pod="web"' not in shown
    assert 'pod="web2"' in shown
    assert 'podgate_listeners_unwatched{namespace="shop",pod="web2"} 2.0' in shown


def test_load_and_losses_are_read_at_scrape_time() -> None:
    metrics = metrics_of()
    metrics.listener_events_lost = 5
    shown = lines(metrics)
    assert "podgate_probes_in_flight 3.0" in shown
    assert "podgate_probes_queued 4.0" in shown
    assert "podgate_listener_events_lost_total 5.0" in shown


def test_delays_and_listener_events_are_counted() -> None:
    metrics = metrics_of()
    metrics.start_delay.observe(0.003)
    metrics.listener_events.labels("close", "confirmed").inc()
    shown = lines(metrics)
    assert 'podgate_probe_start_delay_seconds_bucket{le="0.005"} 1.0' in shown
    assert 'podgate_listener_events_total{kind="close",result="confirmed"} 1.0' in shown


def test_successes_that_lookups_find_are_counted_as_those_of_connections() -> None:
    one_by_one, together = metrics_of(POD), metrics_of(POD)
    durations = [0.0001, 0.0002, 0.003]
    for seconds in durations:
        one_by_one.count_probe(
            POD, container="app", probe_type="Readiness", result="successful", seconds=seconds
        )
    together.count_successes(POD, container="app", probe_type="Readiness", seconds=durations[:1])
    together.count_successes(POD, container="app", probe_type="Readiness", seconds=durations[1:])
    assert lines(together) == lines(one_by_one)


def test_successes_after_a_removal_have_new_series() -> None:
    metrics = metrics_of(POD)
    for _ in range(2):
        metrics.count_successes(POD, container="app", probe_type="Readiness", seconds=[0.001])
        assert any(
            "prober_probe_total{" in line and line.endswith(" 1.0") for line in lines(metrics)
        )
        metrics.forget(POD)
    assert not any("prober_probe_total{" in line for line in lines(metrics))
