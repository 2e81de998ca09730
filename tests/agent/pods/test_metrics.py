"""Metrics of pods, as a scrape shows them."""

import prometheus_client
import pytest

from agent import labels
from agent.pods import conditions
from agent.pods.conditions import Conditions
from agent.pods.metrics import PodCollector
from agent.pods.modes import INVALID, LIMITED
from agent.pods.pod import Pod, Problem
from agent.pods.store import PodStore
from bpf.verdicts import Mode


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


def coverage(store: PodStore) -> dict[str, tuple[float, float]]:
    """Pods desired and in force, by mode; without those that have neither."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(PodCollector(store))
    found = {}
    for mode in Mode:
        labels = {"mode": mode.label}
        desired = registry.get_sample_value("podgate_pods_desired", labels)
        in_force = registry.get_sample_value("podgate_pods_in_force", labels)
        # A mode without a sample would compare with nothing.
        assert desired is not None
        assert in_force is not None
        if desired or in_force:
            found[mode.label] = desired, in_force
    return found


def add(
    store: PodStore, mode: Mode, status: str, reason: str, *, host_network: bool = False
) -> None:
    name = f"pod-{len(store.pods)}"
    pod = Pod(
        uid=name,
        namespace="shop",
        name=name,
        mode=mode,
        netns_path="/run/netns/x",
        host_network=host_network,
    )
    store.set_pod(pod)
    if status:
        store.conditions.set(pod, labels.ISOLATION_READY, status, reason, "")


@pytest.mark.parametrize(
    ("mode", "status", "reason", "in_force"),
    [
        (Mode.ENFORCE, conditions.TRUE, "Enforced", "enforce"),
        (Mode.AUDIT, conditions.TRUE, "Audit", "audit"),
        (Mode.STRICT, conditions.TRUE, "Strict", "strict"),
        (Mode.STRICT, conditions.TRUE, "Enforced", "enforce"),
        (Mode.ENFORCE, conditions.TRUE, "NotSupported", "off"),
        (Mode.ENFORCE, conditions.FALSE, "GateBypassed", "off"),
        (Mode.ENFORCE, conditions.FALSE, "GateFailed", "off"),
        (Mode.ENFORCE, "", "", "off"),
        (Mode.OFF, conditions.TRUE, "Off", "off"),
    ],
)
def test_coverage_compares_the_desired_mode_with_the_one_in_force(
    mode: Mode, status: str, reason: str, in_force: str
) -> None:
    store = PodStore(Conditions())
    add(store, mode, status, reason)
    found = coverage(store)
    assert found[mode.label][0] == found[in_force][1] == 1
    assert sum(desired for desired, _ in found.values()) == 1
    assert sum(counted for _, counted in found.values()) == 1


def test_pods_that_cannot_have_a_gate_are_not_in_the_coverage() -> None:
    store = PodStore(Conditions())
    add(store, Mode.ENFORCE, conditions.TRUE, "HostNetwork", host_network=True)
    store.set_pod(Pod(uid="waits", namespace="shop", name="waits", mode=Mode.ENFORCE))
    assert coverage(store) == {}


def test_file_that_is_no_pod_is_not_shown_as_one() -> None:
    store = PodStore(Conditions())
    problem = Problem("InvalidManifest", "line 3")
    pod = Pod(uid="file:x", namespace="", name="x.yaml", source="x.yaml", manifest_problem=problem)
    store.set_pod(pod)
    store.conditions.set(pod, labels.ISOLATION_READY, conditions.FALSE, "InvalidManifest", "line 3")
    registry = prometheus_client.CollectorRegistry()
    registry.register(PodCollector(store))
    text = prometheus_client.generate_latest(registry).decode()
    assert 'podgate_manifest_invalid{file="x.yaml",reason="InvalidManifest"} 1.0' in text
    assert "podgate_pod_condition{" not in text
