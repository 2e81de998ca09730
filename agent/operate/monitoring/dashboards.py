"""Dashboards for Grafana: the isolation of nodes, and their probes; and all that are shipped.

These two are of chosen nodes, from the agents' own series. Panels by pod show the pods with the
most.
"""

from agent.operate.monitoring import on_call, rolling_out
from agent.operate.monitoring.panels import (
    OF_NODE,
    Dashboard,
    Panel,
    Query,
    Stat,
    most,
    or_zero,
)


def _rate(metric: str, *by: str, where: str = "") -> str:
    selected = f"{OF_NODE},{where}" if where else OF_NODE
    return f"sum by ({', '.join(by)}) (rate({metric}{{{selected}}}[5m]))"


def _quantile(quantile: float, metric: str, *by: str) -> str:
    buckets = f"rate({metric}_bucket{{{OF_NODE}}}[5m])"
    return f"histogram_quantile({quantile}, sum by ({', '.join(('le', *by))}) ({buckets}))"


def _gauge(metric: str, where: str = "") -> str:
    return f"{metric}{{{OF_NODE}{',' if where else ''}{where}}}"


_ENFORCED = 'mode=~"enforce|strict"'
_DROPPED = 'verdict="drop"'
_FAILED = 'result!="successful"'
_OPEN = 'verdict="pass",reason=~"stale|dead-man|unidentified"'

ISOLATION = Dashboard(
    "podgate-isolation",
    "podgate: isolation",
    (
        Stat(
            "Nodes",
            "Nodes with an agent that Prometheus scrapes.",
            "short",
            f"count({_gauge('podgate_build_info')})",
        ),
        Stat(
            "Pods",
            "Pods that have a network namespace of their own.",
            "short",
            f"sum({_gauge('podgate_pods_desired')})",
        ),
        Stat(
            "Enforced",
            "Share of pods whose mode in force is enforce or strict.",
            "percentunit",
            f"sum({_gauge('podgate_pods_in_force', _ENFORCED)}) / "
            f"sum({_gauge('podgate_pods_in_force')})",
        ),
        Stat(
            "Not as desired",
            "Pods whose mode is not in force; 0, but for seconds after a pod starts.",
            "short",
            f"sum(clamp_min({_gauge('podgate_pods_desired')} - "
            f"{_gauge('podgate_pods_in_force')}, 0))",
            red_above=0,
        ),
        Stat(
            "Open",
            "Packets per second that are admitted while the agent or the kubelet is missing.",
            "pps",
            f"sum(rate({_gauge('podgate_gate_packets_total', _OPEN)}[5m]))",
            red_above=0,
        ),
        Stat(
            "Dropped",
            "Packets per second of host processes to enforced pods.",
            "pps",
            f"sum(rate({_gauge('podgate_gate_packets_total', _DROPPED)}[5m]))",
        ),
    ),
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
                        where=_OPEN,
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
                    most(
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
                    most(
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
        Stat(
            "Probes",
            "podgate's own probes per second.",
            "short",
            f"sum(rate({_gauge('prober_probe_total')}[5m]))",
        ),
        Stat(
            "Failed",
            "Share of them without success.",
            "percentunit",
            f"sum(rate({_gauge('prober_probe_total', _FAILED)}[5m])) / "
            f"sum(rate({_gauge('prober_probe_total')}[5m]))",
        ),
        Stat(
            "Delay of probes",
            "99th percentile; over a second is an alert.",
            "s",
            _quantile(0.99, "podgate_probe_start_delay_seconds"),
            red_above=1,
        ),
        Stat(
            "Delay of the event loop",
            "99th percentile; over a second is an alert.",
            "s",
            _quantile(0.99, "podgate_event_loop_lag_seconds"),
            red_above=1,
        ),
        Stat(
            "Relay",
            "Connections that are proxied now.",
            "short",
            f"sum({_gauge('podgate_relay_connections')})",
        ),
        Stat(
            "Late conditions",
            "For how long the API server's conditions of a pod have not been up to date.",
            "s",
            or_zero(f"max({_gauge('podgate_api_pending_seconds')})"),
            red_above=300,
        ),
    ),
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

DASHBOARDS = (rolling_out.ROLLING_OUT, on_call.ON_CALL, ISOLATION, PROBES)
