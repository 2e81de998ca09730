"""Metrics of pods, as a scrape shows them."""

import prometheus_client

from agent.pods.conditions import Conditions
from agent.pods.metrics import PodCollector
from agent.pods.modes import INVALID, LIMITED
from agent.pods.pod import Pod, Problem
from agent.pods.store import PodStore


def test_problems_of_modes_are_one_sample_for_each_reason() -> None:
    store = PodStore(Conditions())
    problems = [Problem(INVALID, "of the pod"), Problem(INVALID, "of its namespace")]
    problems.append(Problem(LIMITED, "by the node"))
    store.set_pod(Pod(uid="u1", namespace="shop", name="web", mode_problems=tuple(problems)))
    store.set_pod(Pod(uid="u2", namespace="shop", name="db"))
    registry = prometheus_client.CollectorRegistry()
    registry.register(PodCollector(store))
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    found = [line for line in lines if line.startswith("podgate_mode_label_problem{")]
    assert found == [
        'podgate_mode_label_problem{namespace="shop",pod="web",reason="InvalidMode"} 1.0',
        'podgate_mode_label_problem{namespace="shop",pod="web",reason="ModeLimited"} 1.0',
    ]


def test_probes_that_send_the_kubelet_elsewhere_are_counted() -> None:
    store = PodStore(Conditions())
    problems = (Problem("ProbeHostNotAllowed", "one"), Problem("ProbeHostNotAllowed", "two"))
    store.set_pod(Pod(uid="u1", namespace="shop", name="web", host_problems=problems))
    store.set_pod(Pod(uid="u2", namespace="shop", name="db"))
    registry = prometheus_client.CollectorRegistry()
    registry.register(PodCollector(store))
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    found = [line for line in lines if line.startswith("podgate_pod_probe_hosts{")]
    assert found == ['podgate_pod_probe_hosts{namespace="shop",pod="web"} 2.0']
