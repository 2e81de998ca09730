"""Reports of relays, summed by pod, container and handler."""

from typing import cast

import prometheus_client
import pytest

from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.relay.messages import (
    OPEN_BUCKETS,
    AnswerOutcome,
    AnswerSample,
    Outcome,
    OutcomeSample,
    RelayReport,
)
from agent.strict.metrics import RelayCollector
from agent.strict.stats import ConnectionStats, purpose_of
from agent.strict.supervisor import RelaySupervisor
from tests.agent.strict.strict_pods import strict_pod

PROBES = {
    "livenessProbe": {"httpGet": {"port": 8080}},
    "readinessProbe": {"httpGet": {"port": 8080}},
    "startupProbe": {"tcpSocket": {"port": 5432}},
    "lifecycle": {"preStop": {"httpGet": {"port": 8080, "path": "/bye"}}},
}
WEB = strict_pod("web", "198.18.1.1", container=PROBES).pod
DB = strict_pod("db", "198.18.1.2", container={"livenessProbe": {"tcpSocket": {"port": 5432}}}).pod


def sample(
    pod: Pod, port: int, outcome: Outcome = "proxied", count: int = 1, seconds: float = 0.0002
) -> OutcomeSample:
    bucket = next(i for i, bound in enumerate(OPEN_BUCKETS) if seconds <= bound)
    buckets = tuple(count if i == bucket else 0 for i in range(len(OPEN_BUCKETS)))
    return OutcomeSample(f"{pod.uid} 198.18.1.1", port, outcome, count, count * seconds, buckets)


@pytest.fixture
def store() -> PodStore:
    made = PodStore(Conditions())
    for pod in (WEB, DB):
        made.set_pod(pod)
    return made


@pytest.fixture
def stats(store: PodStore) -> ConnectionStats:
    return ConnectionStats(store)


def test_port_has_the_names_of_its_handlers() -> None:
    shared = purpose_of(WEB, 8080)
    assert (shared.container, shared.handler) == ("app", "readiness+liveness+preStop")
    assert purpose_of(WEB, 5432).handler == "startup"


def test_undeclared_port_is_a_redirect_only_where_redirects_are_followed() -> None:
    assert purpose_of(WEB, 4444) == purpose_of(WEB, 4445)
    assert (purpose_of(WEB, 4444).container, purpose_of(WEB, 4444).handler) == ("", "redirect")
    assert purpose_of(DB, 4444).handler == ""


def test_samples_are_summed_and_the_last_outcome_kept(stats: ConnectionStats) -> None:
    stats.add([sample(WEB, 8080, count=3), sample(WEB, 8080, "refused", seconds=0.01)])
    stats.add([sample(WEB, 8080, "timeout", seconds=1.0)])
    stats.add([sample(WEB, 5432, "timeout"), sample(WEB, 4444, "reset", seconds=0.5)])
    stats.add([sample(DB, 5432)])
    statuses = stats.status(WEB.uid)
    names = [(one.container, one.handler, one.port) for one in statuses]
    assert names == [
        ("", "redirect", 0),
        ("app", "startup", 5432),
        ("app", "readiness+liveness+preStop", 8080),
    ]
    assert [(one.outcomes, one.last_outcome) for one in statuses] == [
        ({"reset": 1}, "reset"),
        ({"timeout": 1}, "timeout"),
        ({"proxied": 3, "refused": 1, "timeout": 1}, "timeout"),
    ]
    assert [one.open_ms for one in statuses] == [
        pytest.approx(500),
        None,
        pytest.approx((3 * 0.2 + 10) / 4),
    ]


def test_connection_without_a_response_has_no_duration(stats: ConnectionStats) -> None:
    stats.add([sample(DB, 5432, "sandbox_gone")])
    assert stats.status(DB.uid)[0].open_ms is None


def test_samples_of_a_deleted_pod_are_discarded(stats: ConnectionStats, store: PodStore) -> None:
    stats.add([sample(WEB, 8080)])
    stats.answers.add([answers(WEB, "healthy", 1)])
    store.remove_pod(WEB.uid)
    unknown = OutcomeSample("", 80, "unknown_address", 5, 0.0, (0,) * len(OPEN_BUCKETS))
    stats.add([sample(WEB, 8080), unknown, sample(DB, 5432)])
    stats.answers.add([answers(WEB, "healthy", 1), answers(DB, "healthy", 2)])
    stats.keep_only(store.pods)
    assert [(pod.name, found.outcomes) for pod, _, found in stats.items()] == [
        ("db", {"proxied": 1})
    ]
    assert [(pod.name, count) for pod, _, _, count in stats.answers.items()] == [("db", 2)]
    assert stats.unknown_address == 5
    assert stats.status(WEB.uid) == []
    # As a static pod that the kubelet starts again.
    store.set_pod(WEB)
    assert [pod.name for pod, _, _ in stats.items()] == ["db"]
    assert [pod.name for pod, _, _, _ in stats.answers.items()] == ["db"]


class _Relays:
    """The part of the supervisor that the collector uses."""

    is_up = True
    restarts = 2

    def __init__(self, *reports: RelayReport) -> None:
        self.last_reports = reports


def series(stats: ConnectionStats, *reports: RelayReport) -> list[str]:
    registry = prometheus_client.CollectorRegistry()
    registry.register(RelayCollector(cast(RelaySupervisor, _Relays(*reports)), stats))
    text = prometheus_client.generate_latest(registry).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_series_count_outcomes_and_cumulate_buckets(stats: ConnectionStats) -> None:
    stats.add([sample(WEB, 5432, count=2), sample(WEB, 5432, "reset", seconds=0.003)])
    stats.add([OutcomeSample("", 80, "unknown_address", 5, 0.0, (0,) * len(OPEN_BUCKETS))])
    shown = series(stats)
    labels = 'container="app",handler="startup",namespace="shop"'
    count = "podgate_relay_connections_total"
    assert f'{count}{{{labels},outcome="proxied",pod="web"}} 2.0' in shown
    assert f'{count}{{{labels},outcome="reset",pod="web"}} 1.0' in shown
    empty = 'container="",handler="",namespace=""'
    assert f'{count}{{{empty},outcome="unknown_address",pod=""}} 5.0' in shown
    labels = 'container="app",handler="startup",{},namespace="shop",pod="web"'
    bucket = "podgate_relay_connect_duration_seconds_bucket"
    for bound, total in (("0.0001", 0), ("0.00025", 2), ("0.0025", 2), ("0.005", 3), ("+Inf", 3)):
        le = f'le="{bound}"'
        assert f"{bucket}{{{labels.format(le)}}} {total}.0" in shown
    assert "podgate_relay_restarts_total 2.0" in shown


@pytest.mark.parametrize("is_full", [True, False])
def test_load_of_all_relays_is_summed(stats: ConnectionStats, is_full: bool) -> None:
    reports = (RelayReport(3, 2, is_full, ()), RelayReport(4, 0, False, ()))
    shown = series(stats, *reports)
    assert "podgate_relay_connections 7.0" in shown
    assert "podgate_relay_held_syns 2.0" in shown
    assert f"podgate_relay_bypassed {float(is_full)}" in shown


def test_durations_are_those_of_responses_and_summed_over_ports(stats: ConnectionStats) -> None:
    stats.add([sample(WEB, 4444, count=2), sample(WEB, 4445, "refused", seconds=0.003)])
    stats.add([sample(WEB, 4446, "timeout", seconds=1.0), sample(DB, 5432, "timeout")])
    shown = series(stats)
    labels = 'container="",handler="redirect",namespace="shop",pod="web"'
    name = "podgate_relay_connect_duration_seconds"
    assert f"{name}_count{{{labels}}} 3.0" in shown
    (seconds,) = (line for line in shown if line.startswith(f"{name}_sum"))
    assert float(seconds.removeprefix(f"{name}_sum{{{labels}}} ")) == pytest.approx(0.0034)
    assert not any(line.startswith(name) and 'pod="db"' in line for line in shown)
    count = "podgate_relay_connections_total"
    for outcome, total in (("proxied", 2), ("refused", 1), ("timeout", 1)):
        named = labels.replace("pod=", f'outcome="{outcome}",pod=')
        assert f"{count}{{{named}}} {total}.0" in shown


def test_series_of_a_pod_vanish_with_it(stats: ConnectionStats, store: PodStore) -> None:
    stats.add([sample(WEB, 8080), sample(DB, 5432)])
    store.remove_pod(WEB.uid)
    shown = "\n".join(series(stats))
    assert 'pod="web"' not in shown
    assert 'pod="db"' in shown


def answers(pod: Pod, outcome: AnswerOutcome, count: int) -> AnswerSample:
    return AnswerSample(f"{pod.uid} 198.18.1.1", 8080, outcome, count)


def test_answered_and_proxied_probes_are_counted_by_outcome(
    stats: ConnectionStats, store: PodStore
) -> None:
    stats.answers.add([answers(WEB, "healthy", 3), answers(WEB, "stale", 1)])
    stats.answers.add([answers(WEB, "healthy", 2)])
    name = "podgate_relay_answers_total"
    labels = 'container="app",handler="readiness+liveness+preStop",namespace="shop"'
    assert f'{name}{{{labels},outcome="healthy",pod="web"}} 5.0' in series(stats)
    assert f'{name}{{{labels},outcome="stale",pod="web"}} 1.0' in series(stats)
    store.remove_pod(WEB.uid)
    stats.answers.add([answers(WEB, "healthy", 1)])
    stats.keep_only(store.pods)
    assert list(stats.answers.items()) == []


def test_handler_with_two_ports_is_one_series(stats: ConnectionStats) -> None:
    stats.add([sample(WEB, 4444), sample(WEB, 4445)])
    assert sum('handler="redirect"' in line and "connections" in line for line in series(stats))
