"""The dashboard for who is on call: what is wrong now, and the runbook of each alert.

Empty panels are as it should be. Sums are the recording rules'.
"""

from agent.operate.monitoring.alerts import ALERTS, Severity
from agent.operate.monitoring.panels import (
    OF_CLUSTER,
    RUNBOOKS,
    Dashboard,
    Panel,
    Query,
    Stat,
    most,
    or_zero,
)
from agent.operate.monitoring.recordings import AGENTS

_AGENT = f"{OF_CLUSTER},{AGENTS}"
_OPEN = 'verdict="pass",reason=~"stale|dead-man|unidentified"'
_DROP = 'verdict="drop"'
_FAILED = 'result!="successful"'
_STRICT = 'mode="strict"'
_IS_OPEN = 'severity="open"'
_WRONG = 'severity=~"open|broken|degraded"'
# Prometheus' own series of alerts has no more labels than the alert.
_FIRING = 'alertname=~"Podgate.*",alertstate="firing"'
_NODE_PACKETS = "node_verdict_reason:podgate_gate_packets:rate5m"
_PROBE_BUCKETS = "cluster_probe_type_le:prober_probe_duration_seconds_bucket:rate5m"
_RELAY_BUCKETS = "cluster_handler_le:podgate_relay_connect_duration_seconds_bucket:rate5m"
_NOT_IN_FORCE = "node:podgate_pods_not_in_force:sum"


def _of(series: str, where: str = "") -> str:
    return f"{series}{{{OF_CLUSTER}{',' if where else ''}{where}}}"


def _quantile(buckets: str, *by: str) -> str:
    return f"histogram_quantile(0.99, sum by ({', '.join(('le', *by))}) ({_of(buckets)}))"


def _severity(severity: Severity) -> str:
    return f'{_FIRING},severity="{severity}"'


def _runbooks() -> str:
    """Links to the page of each alert, by severity; Markdown."""
    return "\n\n".join(
        f"**{severity}**: "
        + ", ".join(
            f"[{alert.name}]({RUNBOOKS}/{alert.name}.md)"
            for alert in ALERTS
            if alert.severity is severity
        )
        for severity in Severity
    )


ON_CALL = Dashboard(
    "podgate-on-call",
    "podgate: on call",
    (
        Stat(
            "Critical alerts",
            "Isolation is missing now, or will be soon.",
            "short",
            or_zero(f"count(ALERTS{{{_severity(Severity.CRITICAL)}}})"),
            red_above=0,
        ),
        Stat(
            "Warnings",
            "podgate works with less, or will.",
            "short",
            or_zero(f"count(ALERTS{{{_severity(Severity.WARNING)}}})"),
            red_above=0,
        ),
        Stat(
            "Open",
            "Pods, ports or parts that a finding with the severity open is of.",
            "short",
            or_zero(f"sum({_of('podgate_findings', _IS_OPEN)})"),
            red_above=0,
        ),
        Stat(
            "Not as desired",
            "Pods whose mode is not in force.",
            "short",
            f"sum({_of(_NOT_IN_FORCE)})",
            red_above=0,
        ),
        Stat(
            "Agents without response",
            "Agents that Prometheus cannot scrape.",
            "short",
            f"sum(1 - {_of('up', AGENTS)})",
            red_above=0,
        ),
        Stat(
            "Agents not ready",
            "Agents that respond and are not ready.",
            "short",
            f"sum(1 - {_of('podgate_ready', AGENTS)})",
            red_above=0,
        ),
    ),
    (
        Panel(
            "Alerts that fire",
            "Click a line for its runbook.",
            "short",
            (Query(f"count by (alertname, severity) (ALERTS{{{_FIRING}}})", "{{alertname}}"),),
            link=("Runbook", f"{RUNBOOKS[0]}{{{RUNBOOKS[1:]}}}/${{__field.labels.alertname}}.md"),
        ),
        Panel(
            "Findings",
            "What is open, broken or degraded, by kind; `kubectl podgate status --problems` names "
            "the pods and what to do.",
            "short",
            (
                Query(
                    most(f"sum by (severity, kind) ({_of('podgate_findings', _WRONG)})"),
                    "{{severity}} {{kind}}",
                ),
            ),
        ),
        Panel(
            "Open: admitted while the agent or the kubelet is missing",
            "Packets per second, by node and reason. With node-exporter's textfile collector also "
            "of nodes without an agent.",
            "pps",
            (
                Query(
                    f"sum by (node, instance, reason) ({_of(_NODE_PACKETS, _OPEN)}) > 0",
                    "{{node}} {{instance}} {{reason}}",
                ),
            ),
        ),
        Panel(
            "Pods that are not as desired, by node",
            "0, but for seconds after a pod starts.",
            "short",
            (Query(most(f"sum by (node) ({_of(_NOT_IN_FORCE)}) > 0"), "{{node}}"),),
        ),
        Panel(
            "Agents that do not respond, or are not ready",
            "1 for each node; none is as it should be.",
            "short",
            (
                Query(f"1 - up{{{_AGENT}}} > 0", "no response {{node}}"),
                Query(f"1 - podgate_ready{{{_AGENT}}} > 0", "not ready {{node}}"),
            ),
        ),
        Panel(
            "Components that do not work",
            "1 for each node and component; none is as it should be.",
            "short",
            (
                Query(
                    most(f"1 - podgate_component_up{{{_AGENT}}} > 0"),
                    "{{component}} {{node}}",
                ),
            ),
        ),
        Panel(
            "Failing probes, by type",
            "Probes per second without success, of podgate's own.",
            "short",
            (
                Query(
                    "sum by (probe_type, result) "
                    f"({_of('cluster_probe_type_result:prober_probe:rate5m', _FAILED)}) > 0",
                    "{{probe_type}} {{result}}",
                ),
            ),
        ),
        Panel(
            "Failing probes, by namespace",
            "The namespaces with the most. `kubectl podgate why-not-ready` has the pods. Needs "
            "--metrics=namespace or pod.",
            "short",
            (
                Query(
                    most(
                        "sum by (namespace, probe_type) "
                        f"({_of('namespace_probe_type_result:prober_probe:rate5m', _FAILED)}) > 0"
                    ),
                    "{{namespace}} {{probe_type}}",
                ),
            ),
        ),
        Panel(
            "Fallbacks of the relay",
            "Nodes whose relay is full, so that kubelet connections go directly to the gate; pods "
            "that should be strict and are not; restarts in a quarter of an hour.",
            "short",
            (
                Query(f"podgate_relay_bypassed{{{_AGENT}}} > 0", "bypassed {{node}}"),
                Query(
                    f"podgate_pods_desired{{{_AGENT},{_STRICT}}} - "
                    f"podgate_pods_in_force{{{_AGENT},{_STRICT}}} > 0",
                    "not strict {{node}}",
                ),
                Query(
                    f"increase(podgate_relay_restarts_total{{{_AGENT}}}[15m]) > 0",
                    "restarts {{node}}",
                ),
            ),
        ),
        Panel(
            "Relay: connections by outcome",
            "Per second; proxied and healthy are as they should be.",
            "short",
            (
                Query(
                    f"sum by (outcome) ({_of('cluster_outcome:podgate_relay_connections:rate5m')})",
                    "{{outcome}}",
                ),
            ),
        ),
        Panel(
            "Drops, by reason",
            "Packets per second to pods in enforce and strict, and system calls and packets that "
            "are dropped before an interface is chosen (host).",
            "pps",
            (
                Query(
                    "sum by (reason) "
                    f"({_of('cluster_verdict_reason:podgate_gate_packets:rate5m', _DROP)})",
                    "{{reason}}",
                ),
                Query(
                    f"sum by (reason) ({_of('cluster_reason:podgate_node_drops:rate5m')})",
                    "host {{reason}}",
                ),
            ),
        ),
        Panel(
            "Drops, by namespace",
            "The namespaces with the most; `kubectl podgate drops -n NAMESPACE` names processes. "
            "Needs --metrics=namespace or pod.",
            "pps",
            (
                Query(
                    most(
                        "sum by (namespace) "
                        f"({_of('namespace_verdict:podgate_gate_packets:rate5m', _DROP)}) > 0"
                    ),
                    "{{namespace}}",
                ),
            ),
        ),
        Panel(
            "Duration of probes, and of the pod's response in strict",
            "99th percentiles.",
            "s",
            (
                Query(_quantile(_PROBE_BUCKETS, "probe_type"), "probe {{probe_type}}"),
                Query(_quantile(_RELAY_BUCKETS, "handler"), "relay {{handler}}"),
            ),
        ),
        Panel(
            "Late conditions",
            "For how long the API server's conditions of a pod have not been up to date, over half "
            "a minute.",
            "s",
            (
                Query(
                    most(f"max by (node) (podgate_api_pending_seconds{{{_AGENT}}}) > 30"),
                    "{{node}}",
                ),
            ),
        ),
    ),
    notes=("Runbooks", _runbooks()),
    is_by_node=False,
    has_runbooks=True,
)
