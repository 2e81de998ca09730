"""The summary of a node's report, from the agent's own report."""

from collections import Counter

from agent.admin.finding_kinds import Severity
from agent.admin.report import AgentReport, PodStatus
from agent.kube.node_report import NodeSummary
from agent.labels import ISOLATION_READY
from agent.pods import isolation
from agent.pods.conditions import TRUE

_NEVER_GATED = "HostNetwork"
_MODES = {
    "Off": "off",
    isolation.AUDITED: "audit",
    isolation.ENFORCED: "enforce",
    isolation.STRICT: "strict",
}
"""By the condition's reason."""


def of_report(report: AgentReport) -> NodeSummary:
    """With the numbers that `kubectl podgate status` makes of the same report."""
    desired: Counter[str] = Counter()
    in_force: Counter[str] = Counter()
    for pod in report.pods:
        reason, is_in_place = _isolation(pod)
        if reason == _NEVER_GATED:
            continue
        desired[pod.mode] += 1
        if is_in_place and reason in _MODES:
            in_force[_MODES[reason]] += 1
    return NodeSummary(
        report.default_mode,
        report.max_mode,
        has_kubelet=bool(report.kubelet),
        problems=sum(Severity.of(one.severity) is not Severity.NOTE for one in report.findings),
        desired=dict(sorted(desired.items())),
        in_force=dict(sorted(in_force.items())),
    )


def _isolation(pod: PodStatus) -> tuple[str, bool]:
    """Reason of its condition, and whether that is True."""
    for one in pod.conditions:
        if one.type == ISOLATION_READY:
            return one.reason, one.status == TRUE
    return "", False
