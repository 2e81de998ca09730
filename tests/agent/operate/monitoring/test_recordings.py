"""Recording rules: their results with each level of metrics, by promtool, and their names."""

import itertools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
import yaml
from prometheus_client import core, registry

from agent.app.metric_levels import LevelledCollector
from agent.operate.monitoring.alerts import ALERTS
from agent.operate.monitoring.recordings import RECORDINGS
from agent.settings import MetricsLevel

ROOT = pathlib.Path(__file__).parents[4]
RULES = ROOT / "deploy/monitoring/recordings.yaml"
PROMTOOL = pathlib.Path(sys.prefix) / "bin" / "promtool"
# The level, the metric with its unit, and what was done with it.
_NAME = re.compile(r"(node|namespace|cluster)(_\w+)?:([a-z_]+):(sum|rate5m)")

_Samples = dict[str, float]
"""Values by labels, as in PromQL: of gauges, or of counters a second."""

# By node: what its agent counts a second, and its gauges, each with labels of pods.
_COUNTERS: dict[str, dict[str, _Samples]] = {
    "node1": {
        "podgate_gate_packets": {
            'namespace="shop",pod="web",interface="a",verdict="drop",reason="host"': 1,
            'namespace="shop",pod="cart",interface="b",verdict="would-drop",reason="host"': 2,
            'namespace="bank",pod="pay",interface="c",verdict="drop",reason="host"': 3,
        },
        "podgate_node_drops": {'reason="raw-socket"': 1},
        "podgate_rule_hits": {
            'policy="metrics",source="a",protocol="tcp",ports="80"': 1,
            'policy="metrics",source="b",protocol="tcp",ports="80"': 2,
        },
        "prober_probe": {
            'namespace="shop",pod="web",pod_uid="1",container="c",probe_type="Readiness",'
            'result="failed"': 1,
            'namespace="bank",pod="pay",pod_uid="2",container="c",probe_type="Readiness",'
            'result="failed"': 2,
        },
        "podgate_relay_connections": {
            'namespace="shop",pod="web",container="c",handler="http",outcome="proxied"': 1,
            'namespace="bank",pod="pay",container="c",handler="http",outcome="proxied"': 2,
        },
    },
    "node2": {
        "podgate_gate_packets": {
            'namespace="shop",pod="web2",interface="a",verdict="drop",reason="host"': 4,
        },
        "podgate_node_drops": {'reason="raw-socket"': 2},
        "podgate_rule_hits": {'policy="metrics",source="a",protocol="tcp",ports="80"': 3},
    },
}
_BUCKETS: dict[str, _Samples] = {
    "prober_probe_duration_seconds": {
        'namespace="shop",pod="web",container="c",probe_type="Readiness",le="1"': 1,
        'namespace="bank",pod="pay",container="c",probe_type="Readiness",le="1"': 2,
    },
    "podgate_relay_connect_duration_seconds": {
        'namespace="shop",pod="web",container="c",handler="http",le="1"': 1,
        'namespace="bank",pod="pay",container="c",handler="http",le="1"': 2,
    },
}
_GAUGES: dict[str, dict[str, _Samples]] = {
    "node1": {
        "podgate_pods_desired": {'mode="enforce"': 3, 'mode="audit"': 1, 'mode="off"': 0},
        "podgate_pods_in_force": {'mode="enforce"': 1, 'mode="audit"': 1, 'mode="off"': 2},
        "podgate_pod_condition": {
            'namespace="shop",pod="web",condition="c",status="True",reason="Enforced"': 1,
            'namespace="shop",pod="cart",condition="c",status="True",reason="Enforced"': 1,
            'namespace="bank",pod="pay",condition="c",status="False",reason="GateBypassed"': 1,
        },
    },
    "node2": {
        "podgate_pods_desired": {'mode="enforce"': 1, 'mode="audit"': 0, 'mode="off"': 0},
        "podgate_pods_in_force": {'mode="enforce"': 1, 'mode="audit"': 0, 'mode="off"': 0},
        "podgate_pod_condition": {
            'namespace="shop",pod="web2",condition="c",status="True",reason="Enforced"': 1,
        },
    },
}
# Counters of node1 again, and probes of the same name.
_OTHER_JOBS: _Samples = {
    'podgate_gate_packets_total{job="node-exporter",node="node1",instance="192.0.2.1:9100",'
    'namespace="shop",pod="web",verdict="drop",reason="host"}': 1,
    'prober_probe_total{job="kubelet",node="node1",instance="192.0.2.1:10250",namespace="shop",'
    'pod="web",container="c",probe_type="Readiness",result="failed"}': 9,
}
_TARGETS = {
    name: f'node="{name}",instance="192.0.2.{i}:9652"'
    for i, name in enumerate(("node1", "node2"), start=1)
}
_JOB = 'job="podgate/podgate"'
EXPECTED: dict[str, _Samples] = {
    "node_verdict_reason:podgate_gate_packets:rate5m": {
        f'{_JOB},{_TARGETS["node1"]},verdict="drop",reason="host"': 4,
        f'{_JOB},{_TARGETS["node1"]},verdict="would-drop",reason="host"': 2,
        f'{_JOB},{_TARGETS["node2"]},verdict="drop",reason="host"': 4,
        'job="node-exporter",node="node1",instance="192.0.2.1:9100",verdict="drop",'
        'reason="host"': 1,
    },
    "cluster_verdict_reason:podgate_gate_packets:rate5m": {
        'verdict="drop",reason="host"': 8,
        'verdict="would-drop",reason="host"': 2,
    },
    "namespace_verdict:podgate_gate_packets:rate5m": {
        'namespace="shop",verdict="drop"': 5,
        'namespace="shop",verdict="would-drop"': 2,
        'namespace="bank",verdict="drop"': 3,
    },
    "cluster_reason:podgate_node_drops:rate5m": {'reason="raw-socket"': 3},
    "cluster_policy:podgate_rule_hits:rate5m": {'policy="metrics"': 6},
    "cluster_mode:podgate_pods_desired:sum": {
        **{'mode="enforce"': 4, 'mode="audit"': 1, 'mode="off"': 0}
    },
    "cluster_mode:podgate_pods_in_force:sum": {
        **{'mode="enforce"': 2, 'mode="audit"': 1, 'mode="off"': 2}
    },
    "node:podgate_pods_not_in_force:sum": {_TARGETS["node1"]: 2, _TARGETS["node2"]: 0},
    "cluster_condition_status_reason:podgate_pod_condition:sum": {
        'condition="c",status="True",reason="Enforced"': 3,
        'condition="c",status="False",reason="GateBypassed"': 1,
    },
    "namespace_condition_status_reason:podgate_pod_condition:sum": {
        'namespace="shop",condition="c",status="True",reason="Enforced"': 3,
        'namespace="bank",condition="c",status="False",reason="GateBypassed"': 1,
    },
    "cluster_probe_type_result:prober_probe:rate5m": {
        'probe_type="Readiness",result="failed"': 3,
    },
    "namespace_probe_type_result:prober_probe:rate5m": {
        'namespace="shop",probe_type="Readiness",result="failed"': 1,
        'namespace="bank",probe_type="Readiness",result="failed"': 2,
    },
    "cluster_probe_type_le:prober_probe_duration_seconds_bucket:rate5m": {
        'probe_type="Readiness",le="1"': 3,
    },
    "cluster_outcome:podgate_relay_connections:rate5m": {'outcome="proxied"': 3},
    "cluster_handler_le:podgate_relay_connect_duration_seconds_bucket:rate5m": {
        'handler="http",le="1"': 3,
    },
}


class _Metrics(registry.Collector):
    """What the agent of a node counts and knows. Its counters grow by these values a second."""

    def __init__(self, node: str) -> None:
        self._node = node

    def collect(self) -> Iterator[core.Metric]:
        buckets = _BUCKETS if self._node == "node1" else {}
        kinds: tuple[tuple[str, str, dict[str, _Samples]], ...] = (
            ("counter", "_total", _COUNTERS[self._node]),
            ("histogram", "_bucket", buckets),
            ("gauge", "", _GAUGES[self._node]),
        )
        for kind, suffix, metrics in kinds:
            for name, samples in metrics.items():
                metric = core.Metric(name, "", kind)
                for labels, value in samples.items():
                    found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
                    metric.add_sample(f"{name}{suffix}", found, value)
                yield metric


def _input(level: MetricsLevel) -> Iterator[dict[str, str]]:
    """Series of both nodes, a sample a minute."""
    for node, target in _TARGETS.items():
        for metric in LevelledCollector(_Metrics(node), level).collect():
            for sample in metric.samples:
                own = [f'{name}="{value}"' for name, value in sample.labels.items()]
                series = f"{sample.name}{{{','.join((_JOB, target, *own))}}}"
                yield _series(series, sample.value, is_counter=metric.type != "gauge")
    for series, value in _OTHER_JOBS.items():
        yield _series(series, value, is_counter=True)


def _series(series: str, value: float, *, is_counter: bool) -> dict[str, str]:
    values = f"0+{value * 60:g}x10" if is_counter else f"{value:g}x10"
    return {"series": series, "values": values}


def _run(path: pathlib.Path, level: MetricsLevel, expected: dict[str, _Samples]) -> tuple[int, str]:
    """promtool's exit status and output. Rates are rounded, since they are extrapolated."""
    test = {
        "name": level.value,
        "interval": "1m",
        "input_series": list(_input(level)),
        "promql_expr_test": [
            {
                "expr": f"round({name}, 0.001)",
                "eval_time": "10m",
                "exp_samples": [
                    {"labels": f"{{{labels}}}", "value": value} for labels, value in samples.items()
                ],
            }
            for name, samples in expected.items()
        ],
    }
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
    path.write_text(yaml.safe_dump(content))
    done = subprocess.run(
        (PROMTOOL, "test", "rules", str(path)), capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("level", MetricsLevel)
def test_results_are_equal_with_each_level_that_a_rule_names(
    level: MetricsLevel, tmp_path: pathlib.Path
) -> None:
    """With another one there are none."""
    expected = {one.name: EXPECTED[one.name] if level in one.levels else {} for one in RECORDINGS}
    status, output = _run(tmp_path / "tests.yaml", level, expected)
    assert status == 0, output


def test_a_wrong_result_would_be_found(tmp_path: pathlib.Path) -> None:
    expected = {"node:podgate_pods_not_in_force:sum": {_TARGETS["node1"]: 1.0}}
    status, _ = _run(tmp_path / "tests.yaml", MetricsLevel.POD, expected)
    assert status == 1


def test_each_rule_has_an_expected_result() -> None:
    assert [one.name for one in RECORDINGS] == list(EXPECTED)


def test_names_are_level_metric_operations() -> None:
    """The level names the labels of the result: https://prometheus.io/docs/practices/rules/."""
    for name, samples in EXPECTED.items():
        found = _NAME.fullmatch(name)
        assert found, name
        named = {found[1], *re.findall("probe_type|[a-z]+", found[2] or "")} - {"cluster"}
        labels = set(re.findall(r'(\w+)="', next(iter(samples))))
        assert labels - {"instance", "job"} == named, name


def test_rules_file_is_valid() -> None:
    done = subprocess.run(
        (PROMTOOL, "check", "rules", str(RULES)), capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(RECORDINGS)} rules found" in done.stdout


def test_alerts_do_not_need_recording_rules() -> None:
    """They fire also where these are not installed."""
    names: Iterable[str] = (one.name for one in RECORDINGS)
    pairs = itertools.product(names, ALERTS)
    assert [(name, alert.name) for name, alert in pairs if name in alert.expression] == []
