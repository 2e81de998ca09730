"""Probes and listeners as Prometheus sees them; a pod's series end with the pod."""

from __future__ import annotations

from agent.metrics import Metrics
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod

POD = Pod(uid="u", namespace="shop", name="web")
OTHER = Pod(uid="v", namespace="shop", name="web2")


def lines(metrics: Metrics, *pods: Pod) -> list[str]:
    text = metrics.render(pods, []).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_probes_are_counted_with_the_kubelets_labels() -> None:
    metrics = Metrics(Conditions())
    metrics.count_probe(
        POD, container="app", probe_type="Readiness", result="successful", seconds=0.002
    )
    shown = lines(metrics, POD)
    labels = (
        'container="app",namespace="shop",pod="web",pod_uid="u"'
        ',probe_type="Readiness",result="successful"'
    )
    assert f"prober_probe_total{{{labels}}} 1.0" in shown
    assert any(line.startswith("prober_probe_duration_seconds_bucket{") for line in shown)


def test_series_of_a_pod_vanish_with_it_and_others_stay() -> None:
    metrics = Metrics(Conditions())
    for pod in (POD, OTHER):
        metrics.count_probe(
            pod, container="app", probe_type="Readiness", result="failed", seconds=1.0
        )
        metrics.unwatched_listeners[pod.uid] = 2
    metrics.forget(POD)
    shown = "\n".join(lines(metrics, OTHER))
    assert 'pod="web"' not in shown
    assert 'pod="web2"' in shown
    assert 'podgate_listeners_unwatched{namespace="shop",pod="web2"} 2.0' in shown


def test_load_and_losses_are_read_at_scrape_time() -> None:
    metrics = Metrics(Conditions())
    metrics.probe_load = lambda: (3, 4)
    metrics.listener_events_lost = 5
    shown = lines(metrics)
    assert "podgate_probes_in_flight 3.0" in shown
    assert "podgate_probes_waiting 4.0" in shown
    assert "podgate_listener_events_lost_total 5.0" in shown


def test_delays_and_hints_are_counted() -> None:
    metrics = Metrics(Conditions())
    metrics.probe_delay_seconds.observe(0.003)
    metrics.listener_hints.labels("close", "confirmed").inc()
    shown = lines(metrics)
    assert 'podgate_probe_delay_seconds_bucket{le="0.005"} 1.0' in shown
    assert 'podgate_listener_hints_total{fate="confirmed",kind="close"} 1.0' in shown
