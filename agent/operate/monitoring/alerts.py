"""The alerts: each names what an operator must act on, and has a page in docs/runbooks.

Expressions use series that exist from the agent's start, since `increase` does not see the first
sample of a new one. They keep the labels node and instance, and those that name what is concerned.
The label node is from the PodMonitor's relabeling (docs/monitoring.md); a job of one's own may lack
it, so summaries fall back to the instance.
"""

import dataclasses
import enum
import pathlib
import re
from typing import Any

from agent.admin import finding_kinds as kinds
from agent.admin.finding_kinds import Kind
from agent.operate.monitoring.recordings import AGENTS

_UP = f"up{{{AGENTS}}}"
_CONTROLLER_UP = 'up{job=~"(.*/)?podgate-controller"}'
# Of kube-state-metrics. A Job that still runs has neither failed nor succeeded.
_VERIFY = 'job_name=~"podgate-verify-.*"'
_VERIFY_START = f"kube_job_status_start_time{{{_VERIFY}}}"


def _last_verified(outcome: str) -> str:
    return (
        f"max by (namespace) ({_VERIFY_START} and on (namespace, job_name) "
        f"kube_job_status_{outcome}{{{_VERIFY}}} > 0)"
    )


_NODE = "{{ $labels.node }}"
_NODE_OR_INSTANCE = "{{ or $labels.node $labels.instance }}"

RUNBOOKS = "docs/runbooks"
_ROOT = pathlib.Path(__file__).parents[3]
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


class Severity(enum.StrEnum):
    """critical: isolation is missing now or soon; warning: podgate works with less, or will; info:
    figures are incomplete, or a pod is not as its annotations want it."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


@dataclasses.dataclass(frozen=True, slots=True)
class Alert:
    """One alert. name: also its runbook's; lasting: how long the expression holds before it fires,
    in Prometheus' notation; summary: one sentence, with templates."""

    name: str
    severity: Severity
    expression: str
    lasting: str
    summary: str

    @property
    def runbook(self) -> str:
        """Path of its page."""
        return f"{RUNBOOKS}/{self.name}.md"

    def description(self) -> str:
        """The symptom of its page, in one paragraph. Raises `OSError`."""
        page = (_ROOT / self.runbook).read_text("utf-8")
        symptom = page.partition("## Symptom\n")[2].partition("\n## ")[0]
        return " ".join(_LINK.sub(r"\1", symptom).split())

    def rule(self) -> dict[str, Any]:
        """As in a rules file of Prometheus."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity.value},
            "annotations": {
                "summary": self.summary.replace(_NODE, _NODE_OR_INSTANCE),
                "description": self.description(),
                "runbook": self.runbook,
            },
        }


def _found(*found: Kind) -> str:
    """An expression: a finding of one of these kinds."""
    names = "|".join(kind.name for kind in found)
    return f'podgate_findings{{kind=~"{names}"}} > 0'


# Open kinds with an alert of their own.
_ALERTED = (
    *(kinds.DECLARED_PORTS_OPEN, kinds.DEFAULT_DENY_MISSING, kinds.GATE_BYPASSED),
    *(kinds.GATE_FAILED, kinds.GATE_DETACHED, kinds.NOT_SUPPORTED, kinds.NETNS_UNUSABLE),
)

ALERTS = (
    Alert(
        "PodgateHoleOpen",
        Severity.CRITICAL,
        "sum by (node, instance, reason) (increase(podgate_gate_packets_total"
        '{verdict="pass",reason=~"stale|dead-man|unidentified"}[10m])) > 0',
        "0m",
        "Gates of {{ $labels.node }} admitted host processes for want of the agent or the "
        "kubelet ({{ $labels.reason }}).",
    ),
    Alert(
        "PodgateGateBypassed",
        Severity.CRITICAL,
        "sum by (node, instance, namespace, pod) "
        '(podgate_path_test_addresses{result="bypassed"}) > 0',
        "5m",
        "{{ $labels.node }} reaches {{ $labels.namespace }}/{{ $labels.pod }} without passing "
        "its gate.",
    ),
    Alert(
        "PodgateCoverageLow",
        Severity.CRITICAL,
        'sum by (node, instance) (podgate_pods_in_force{mode=~"enforce|strict"}) < '
        'sum by (node, instance) (podgate_pods_desired{mode=~"enforce|strict"})',
        "2m",
        "Fewer pods of {{ $labels.node }} are enforced than should be.",
    ),
    Alert(
        "PodgateStrictFallback",
        Severity.WARNING,
        'podgate_pods_in_force{mode="strict"} < podgate_pods_desired{mode="strict"}',
        "10m",
        "Pods of {{ $labels.node }} should be strict and are not.",
    ),
    Alert(
        "PodgateGateLost",
        Severity.WARNING,
        "increase(podgate_gates_lost_total[15m]) > 0 or "
        "increase(podgate_gate_updates_failed_total[15m]) > 3",
        "0m",
        "Something removes gates of {{ $labels.node }}, or the agent cannot update them.",
    ),
    Alert(
        "PodgateKubeletUnknown",
        Severity.CRITICAL,
        _found(kinds.DECLARED_PORTS_OPEN),
        "2m",
        "Declared ports are open to host processes of {{ $labels.node }}, since the kubelet is "
        "not identified.",
    ),
    Alert(
        "PodgateAgentStale",
        Severity.CRITICAL,
        f"{_UP} == 0 or podgate_heartbeat_age_seconds > 15",
        "5m",
        "The agent of {{ $labels.node }} does not respond.",
    ),
    Alert(
        "PodgateAgentsAbsent",
        Severity.CRITICAL,
        f"absent({_UP})",
        "15m",
        "Prometheus scrapes no agent of podgate.",
    ),
    Alert(
        "PodgateDeadManNear",
        Severity.CRITICAL,
        "podgate_dead_man_remaining_seconds < 6 * 3600 or "
        f"(max_over_time({_UP}[18h]) == 0 and {_UP} offset 18h)",
        "5m",
        "All gates of {{ $labels.node }} open soon, since no agent runs (--dead-man-hours).",
    ),
    Alert(
        "PodgateHookGone",
        Severity.CRITICAL,
        "podgate_hook_attached == 0",
        "5m",
        "A hook at the root cgroup of {{ $labels.node }} does not work.",
    ),
    Alert(
        "PodgateDefaultDenyGone",
        Severity.CRITICAL,
        _found(kinds.DEFAULT_DENY_MISSING),
        "2m",
        "New pods of {{ $labels.node }} are open until they have their gate.",
    ),
    Alert(
        "PodgateComponentDown",
        Severity.WARNING,
        _found(
            *(kinds.RELAY_MISSING, kinds.RELAY_MISSING_PROBES_FAIL, kinds.RUNTIME_UNREACHABLE),
            *(kinds.WATCH_BROKEN, kinds.DEFINITION_MISSING, kinds.CONDITIONS_NOT_WRITTEN),
            *(kinds.CNI_PLUGIN_MISSING, kinds.NRI_NOT_CONNECTED),
            *(kinds.COMPONENT_FAILING, kinds.PORT_NOT_OPEN),
            *(kinds.STATE_NOT_WRITTEN, kinds.HOST_PROBES_NOT_DENIED, kinds.PODS_CGROUP_MISSING),
        ),
        "5m",
        "A part of podgate does not work on {{ $labels.node }}: {{ $labels.kind }}.",
    ),
    Alert(
        "PodgateOpen",
        Severity.WARNING,
        'podgate_findings{severity="open",kind!~"'
        f"{'|'.join(kind.name for kind in _ALERTED)}"
        '"} > 0',
        "15m",
        "Pods of {{ $labels.node }} are open: {{ $labels.kind }}.",
    ),
    Alert(
        "PodgateNotReady",
        Severity.WARNING,
        "podgate_ready == 0",
        "15m",
        "The agent of {{ $labels.node }} is not ready.",
    ),
    Alert(
        "PodgateProbesLate",
        Severity.WARNING,
        "histogram_quantile(0.99, sum by (node, instance, le) "
        "(rate(podgate_probe_start_delay_seconds_bucket[10m]))) > 1",
        "10m",
        "Probes on {{ $labels.node }} start more than a second late.",
    ),
    Alert(
        "PodgateEventLoopSlow",
        Severity.WARNING,
        "histogram_quantile(0.99, sum by (node, instance, le) "
        "(rate(podgate_event_loop_lag_seconds_bucket[10m]))) > 1",
        "10m",
        "The agent of {{ $labels.node }} is more than a second late.",
    ),
    Alert(
        "PodgateEventsLost",
        Severity.INFO,
        "increase(podgate_drop_events_suppressed_total[15m]) + "
        "increase(podgate_listener_events_lost_total[15m]) > 0",
        "15m",
        "{{ $labels.node }} counts more drops or listeners than it reports one by one.",
    ),
    Alert(
        "PodgateMapNearlyFull",
        Severity.WARNING,
        'podgate_map_entries / on (node, instance, map) podgate_map_max_entries{kind="hash"} > 0.8',
        "10m",
        "The map {{ $labels.map }} of {{ $labels.node }} is nearly full.",
    ),
    Alert(
        "PodgateRuleLeftOut",
        Severity.WARNING,
        "podgate_rules_skipped > 0",
        "5m",
        "Gates of {{ $labels.node }} have no room for rules of {{ $labels.policy }}.",
    ),
    Alert(
        "PodgatePolicyNotApplied",
        Severity.WARNING,
        _found(kinds.POLICY_NOT_APPLIED, kinds.POLICY_WITHOUT_EFFECT),
        "10m",
        "Policies are not applied as written on {{ $labels.node }}, or have no effect.",
    ),
    Alert(
        "PodgateApiWritesStuck",
        Severity.WARNING,
        "podgate_api_pending_seconds > 300",
        "5m",
        "{{ $labels.node }} cannot report conditions of pods to the API server.",
    ),
    Alert(
        "PodgateTokenCannotWrite",
        Severity.WARNING,
        'increase(podgate_api_patches_total{code=~"401|403"}[15m]) > 0',
        "0m",
        "The API server rejects the token of {{ $labels.node }} ({{ $labels.code }}).",
    ),
    Alert(
        "PodgateWatchSilent",
        Severity.WARNING,
        "podgate_watch_healthy == 0 or podgate_watch_age_seconds > 600",
        "15m",
        "{{ $labels.node }} receives no changes of {{ $labels.resource }}.",
    ),
    Alert(
        "PodgateProbesNotAnswered",
        Severity.INFO,
        "sum by (node, instance, reason) (podgate_probes_not_answered) > 0",
        "15m",
        "Probes of {{ $labels.node }} that podgate is to answer reach the pods "
        "({{ $labels.reason }}).",
    ),
    Alert(
        "PodgateServicesOld",
        Severity.WARNING,
        "podgate_services_source_up == 0 or podgate_services_saved_age_seconds > 300",
        "10m",
        "{{ $labels.node }} serves service endpoints that its source does not confirm.",
    ),
    Alert(
        "PodgateProxyNotInStep",
        Severity.WARNING,
        "increase(podgate_proxy_sync_failures_total[10m]) > 0",
        "10m",
        "The service proxy of {{ $labels.node }} cannot write services to the kernel.",
    ),
    Alert(
        "PodgateControllerDown",
        Severity.WARNING,
        f"{_CONTROLLER_UP} == 0",
        "15m",
        "The controller {{ $labels.instance }} does not respond.",
    ),
    Alert(
        "PodgateVerifyFailed",
        Severity.CRITICAL,
        f"{_last_verified('failed')} > ({_last_verified('succeeded')} or "
        f"max by (namespace) ({_VERIFY_START}) * 0)",
        "0m",
        "kubectl podgate verify found pods open, or could not try all nodes.",
    ),
    Alert(
        "PodgateWebhookCertificate",
        Severity.WARNING,
        "podgate_controller_webhook_certificate_valid == 0",
        "15m",
        "The controller {{ $labels.instance }} has no valid certificate, so it reviews no pods.",
    ),
)


def rules() -> dict[str, Any]:
    """A rules file of Prometheus, as YAML's data."""
    return {"groups": [{"name": "podgate", "rules": [alert.rule() for alert in ALERTS]}]}


def table() -> str:
    """The alerts for docs/reference/alerts.md, Markdown."""
    lines = ["| alert | severity | fires if | for |", "|---|---|---|---|"]
    for alert in ALERTS:
        name = f"[{alert.name}](../runbooks/{alert.name}.md)"
        expression = alert.expression.replace("|", "\\|")
        lines.append(f"| {name} | {alert.severity} | `{expression}` | {alert.lasting} |")
    return "\n".join(lines) + "\n"
