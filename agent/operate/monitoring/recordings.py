"""Recording rules: what dashboards show of a node or a cluster, over series of many pods.

Names are as Prometheus recommends, `level:metric:operations`; the level names the labels that the
result keeps, beside `cluster`, which some add to their targets, and `instance` of a node. Alerts do
not use them, so that they work without these rules.

All but the first select the agents' job. `podgate metrics` in node-exporter's textfile collector
(docs/monitoring.md) has counters of gates again, and the kubelet has probes of the same name.
"""

import dataclasses
from typing import Any

from agent.settings import MetricsLevel

AGENTS = 'job=~"(.*/)?podgate"'
"""Of the PodMonitor, "podgate/podgate"; of a job of one's own, "podgate"."""
_ALL = (MetricsLevel.POD, MetricsLevel.NAMESPACE, MetricsLevel.NODE)
_WITH_NAMESPACES = (MetricsLevel.POD, MetricsLevel.NAMESPACE)


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """One rule. description: what its value is; levels: of metrics that it has a result with."""

    name: str
    expression: str
    description: str
    levels: tuple[MetricsLevel, ...] = _ALL

    def rule(self) -> dict[str, str]:
        """As in a rules file of Prometheus."""
        return {"record": self.name, "expr": self.expression}


def _sum(expression: str, *by: str) -> str:
    return f"sum by ({', '.join(('cluster', *by))}) ({expression})"


def _rate(metric: str, *by: str, where: str = "") -> str:
    selected = ",".join(filter(None, (AGENTS, where)))
    return _sum(f"rate({metric}{{{selected}}}[5m])", *by)


_OF_NAMESPACE = 'namespace!=""'
_NODE_PACKETS = "node_verdict_reason:podgate_gate_packets:rate5m"

RECORDINGS = (
    Recording(
        _NODE_PACKETS,
        _sum(
            "rate(podgate_gate_packets_total[5m])",
            *("job", "node", "instance", "verdict", "reason"),
        ),
        "Host packets to gated pods of a node, per second, by verdict and reason.",
    ),
    Recording(
        "cluster_verdict_reason:podgate_gate_packets:rate5m",
        _sum(f"{_NODE_PACKETS}{{{AGENTS}}}", "verdict", "reason"),
        "The same of all nodes.",
    ),
    Recording(
        "namespace_verdict:podgate_gate_packets:rate5m",
        _rate("podgate_gate_packets_total", "namespace", "verdict", where=_OF_NAMESPACE),
        "Host packets to gated pods of a namespace, per second, by verdict.",
        _WITH_NAMESPACES,
    ),
    Recording(
        "cluster_reason:podgate_node_drops:rate5m",
        _rate("podgate_node_drops_total", "reason"),
        "System calls and packets dropped before an interface is chosen, per second, by reason.",
    ),
    Recording(
        "cluster_policy:podgate_rule_hits:rate5m",
        _rate("podgate_rule_hits_total", "policy"),
        "New flows that a policy admits, per second.",
    ),
    Recording(
        "cluster_mode:podgate_pods_desired:sum",
        _sum(f"podgate_pods_desired{{{AGENTS}}}", "mode"),
        "Pods by the mode that labels and settings give them.",
    ),
    Recording(
        "cluster_mode:podgate_pods_in_force:sum",
        _sum(f"podgate_pods_in_force{{{AGENTS}}}", "mode"),
        "Pods by the mode that is in force.",
    ),
    Recording(
        "node:podgate_pods_not_in_force:sum",
        _sum(
            f"clamp_min(podgate_pods_desired{{{AGENTS}}} - podgate_pods_in_force{{{AGENTS}}}, 0)",
            *("node", "instance"),
        ),
        "Pods of a node whose mode is not in force.",
    ),
    Recording(
        "cluster_condition_status_reason:podgate_pod_condition:sum",
        _sum(f"podgate_pod_condition{{{AGENTS}}}", "condition", "status", "reason"),
        "Pods by status and reason of a condition.",
    ),
    Recording(
        "namespace_condition_status_reason:podgate_pod_condition:sum",
        _sum(
            f"podgate_pod_condition{{{AGENTS},{_OF_NAMESPACE}}}",
            *("namespace", "condition", "status", "reason"),
        ),
        "Pods of a namespace by status and reason of a condition.",
        _WITH_NAMESPACES,
    ),
    Recording(
        "cluster_probe_type_result:prober_probe:rate5m",
        _rate("prober_probe_total", "probe_type", "result"),
        "podgate's own probes, per second, by type and result.",
    ),
    Recording(
        "namespace_probe_type_result:prober_probe:rate5m",
        _rate("prober_probe_total", "namespace", "probe_type", "result", where=_OF_NAMESPACE),
        "podgate's own probes of a namespace's pods, per second, by type and result.",
        _WITH_NAMESPACES,
    ),
    Recording(
        "cluster_probe_type_le:prober_probe_duration_seconds_bucket:rate5m",
        _rate("prober_probe_duration_seconds_bucket", "probe_type", "le"),
        "Buckets of the duration of probes, for `histogram_quantile`.",
    ),
    Recording(
        "cluster_outcome:podgate_relay_connections:rate5m",
        _rate("podgate_relay_connections_total", "outcome"),
        "Connections of kubelets to pods in strict, per second, by outcome.",
    ),
    Recording(
        "cluster_handler_le:podgate_relay_connect_duration_seconds_bucket:rate5m",
        _rate("podgate_relay_connect_duration_seconds_bucket", "handler", "le"),
        "Buckets of the time until a pod in strict responds, for `histogram_quantile`.",
    ),
)


def group() -> dict[str, Any]:
    """A group of a rules file. Rules of a group are evaluated in order."""
    return {"name": "podgate.rules", "rules": [one.rule() for one in RECORDINGS]}


def table() -> str:
    """The rules for docs/reference/recordings.md, Markdown."""
    lines = ["| series | value | expression | needs `--metrics=` |", "|---|---|---|---|"]
    for one in RECORDINGS:
        levels = ", ".join(f"`{level.value}`" for level in one.levels)
        needs = "any" if one.levels == _ALL else levels
        expression = one.expression.replace("|", "\\|")
        lines.append(f"| `{one.name}` | {one.description} | `{expression}` | {needs} |")
    return "\n".join(lines) + "\n"
