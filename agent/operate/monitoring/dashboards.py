"""Dashboards for Grafana, as its JSON: the node's isolation, and its probes.

Panels by pod show the pods with the most: a cluster has thousands.

Panels are time series of at most three expressions, in a grid of two columns. `$instance` is a
variable of each dashboard, and `$datasource` the Prometheus.
"""

import dataclasses
import json
from typing import Any

_HEIGHT = 8
_WIDTH = 12
# The version of Grafana's dashboard model in which time series panels have these fields.
_SCHEMA = 39
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_LINKS = {
    **{"type": "dashboards", "tags": ["podgate"], "title": "podgate", "asDropdown": False},
    **{"includeVars": True, "keepTime": True},
}
_MOST_PODS = 20
_SELECTED = 'instance=~"$instance"'


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """One expression. legend: of its series, with Grafana's templates."""

    expression: str
    legend: str


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One panel. description: what is normal; unit: one of Grafana's."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard. uid: stable, for links; also the file's name."""

    uid: str
    title: str
    panels: tuple[Panel, ...]

    def document(self) -> dict[str, Any]:
        """As Grafana imports it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["podgate"],
            "links": [_LINKS],
            "schemaVersion": _SCHEMA,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": [_datasource_variable(), _instance_variable()]},
            "panels": [_panel(i, panel) for i, panel in enumerate(self.panels)],
        }

    def content(self) -> str:
        return json.dumps(self.document(), indent=1) + "\n"


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }


def _instance_variable() -> dict[str, Any]:
    query = "label_values(podgate_build_info, instance)"
    return {
        "name": "instance",
        "label": "Node",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "instance"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    column, row = number % 2, number // 2
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def _rate(metric: str, *by: str, where: str = "") -> str:
    selected = f"{_SELECTED},{where}" if where else _SELECTED
    return f"sum by ({', '.join(by)}) (rate({metric}{{{selected}}}[5m]))"


def _most(expression: str) -> str:
    return f"topk({_MOST_PODS}, {expression})"


def _quantile(quantile: float, metric: str, *by: str) -> str:
    buckets = f"rate({metric}_bucket{{{_SELECTED}}}[5m])"
    return f"histogram_quantile({quantile}, sum by ({', '.join(('le', *by))}) ({buckets}))"


def _gauge(metric: str, where: str = "") -> str:
    return f"{metric}{{{_SELECTED}{',' if where else ''}{where}}}"


ISOLATION = Dashboard(
    "podgate-isolation",
    "podgate: isolation",
    (
        Panel(
            "Coverage",
            "Pods by mode. Desired and in force are equal, but for seconds after a pod starts.",
            "short",
            (
                Query(f"sum by (mode) ({_gauge('podgate_pods_desired')})", "desired {{mode}}"),
                Query(f"sum by (mode) ({_gauge('podgate_pods_in_force')})", "in force {{mode}}"),
            ),
        ),
        Panel(
            "Open: admitted while the agent or the kubelet is missing",
            "Packets per second. Anything over 0 is an open hole.",
            "pps",
            (
                Query(
                    _rate(
                        "podgate_gate_packets_total",
                        *("instance", "reason"),
                        where='verdict="pass",reason=~"stale|dead-man|unidentified"',
                    ),
                    "{{instance}} {{reason}}",
                ),
            ),
        ),
        Panel(
            "Pods with the most drops",
            "Packets per second of host processes to enforced pods; `podgate drops` names them.",
            "pps",
            (
                Query(
                    _most(
                        _rate(
                            "podgate_gate_packets_total",
                            *("namespace", "pod"),
                            where='verdict="drop"',
                        )
                    ),
                    "{{namespace}}/{{pod}}",
                ),
            ),
        ),
        Panel(
            "Pods in audit with the most that enforce would drop",
            "Packets per second. Write policies until it is 0.",
            "pps",
            (
                Query(
                    _most(
                        _rate(
                            "podgate_gate_packets_total",
                            *("namespace", "pod"),
                            where='verdict="would-drop"',
                        )
                    ),
                    "{{namespace}}/{{pod}}",
                ),
            ),
        ),
        Panel(
            "Admitted, by reason",
            "Packets per second from the host that passed: replies, probes, rules.",
            "pps",
            (
                Query(
                    _rate("podgate_gate_packets_total", "reason", where='verdict="pass"'),
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            "Rule hits",
            "New flows per second that HostAccessPolicies admit.",
            "short",
            (Query(_rate("podgate_rule_hits_total", "policy"), "{{policy}}"),),
        ),
        Panel(
            "Components",
            "1: the component works.",
            "short",
            (
                Query(f"min by (component) ({_gauge('podgate_component_up')})", "{{component}}"),
                Query(f"min({_gauge('podgate_hook_attached')})", "all hooks attached"),
                Query(f"min({_gauge('podgate_kubelet_admitted')})", "kubelet admitted"),
            ),
        ),
        Panel(
            "Heartbeat",
            "Seconds since the last heartbeat; about 1.",
            "s",
            (Query(_gauge("podgate_heartbeat_age_seconds"), "{{instance}}"),),
        ),
        Panel(
            "Room in maps",
            "Share of entries in use; over 80 % is an alert.",
            "percentunit",
            (
                Query(
                    f"{_gauge('podgate_map_entries')} / on (instance, map) "
                    + _gauge("podgate_map_max_entries", 'kind="hash"'),
                    "{{map}}",
                ),
            ),
        ),
        Panel(
            "Programs",
            "CPU seconds per second, while kernel.bpf_stats_enabled is 1.",
            "s",
            (Query(_rate("podgate_program_run_seconds_total", "program"), "{{program}}"),),
        ),
    ),
)

PROBES = Dashboard(
    "podgate-probes",
    "podgate: probes and API server",
    (
        Panel(
            "Probes by result",
            "podgate's own probes per second.",
            "short",
            (
                Query(
                    _rate("prober_probe_total", "probe_type", "result"), "{{probe_type}} {{result}}"
                ),
            ),
        ),
        Panel(
            "Duration of probes",
            "Of the 99th percentile.",
            "s",
            (
                Query(
                    _quantile(0.99, "prober_probe_duration_seconds", "probe_type"),
                    "{{probe_type}}",
                ),
            ),
        ),
        Panel(
            "Delay of probes and of the event loop",
            "99th percentiles; milliseconds.",
            "s",
            (
                Query(_quantile(0.99, "podgate_probe_start_delay_seconds"), "probe start"),
                Query(_quantile(0.99, "podgate_event_loop_lag_seconds"), "event loop"),
            ),
        ),
        Panel(
            "Relay: connections by outcome",
            "The kubelet's connections to pods in strict, per second.",
            "short",
            (Query(_rate("podgate_relay_connections_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Relay: open connections",
            "Connections that are proxied, and SYNs that wait for the pod.",
            "short",
            (
                Query(f"sum({_gauge('podgate_relay_connections')})", "connections"),
                Query(f"sum({_gauge('podgate_relay_held_syns')})", "held SYNs"),
            ),
        ),
        Panel(
            "Relay: time until the pod responds",
            "99th percentile.",
            "s",
            (
                Query(
                    _quantile(0.99, "podgate_relay_connect_duration_seconds", "handler"),
                    "{{handler}}",
                ),
            ),
        ),
        Panel(
            "Patches of conditions",
            "Per second, by status code; 0 at rest.",
            "short",
            (Query(_rate("podgate_api_patches_total", "code"), "{{code}}"),),
        ),
        Panel(
            "Age of watches",
            "Since the API server last sent something: up to a minute and a half.",
            "s",
            (Query(f"max by (resource) ({_gauge('podgate_watch_age_seconds')})", "{{resource}}"),),
        ),
        Panel(
            "CPU of the agent",
            "Seconds per second; under 0.1 at rest.",
            "s",
            (Query(_rate("process_cpu_seconds_total", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Memory of the agent",
            "Resident bytes.",
            "bytes",
            (Query(_gauge("process_resident_memory_bytes"), "{{instance}}"),),
        ),
    ),
)

DASHBOARDS = (ISOLATION, PROBES)
