"""Output of `podgate rules`."""

import dataclasses
from collections.abc import Sequence

import msgspec

from agent.admin.report import (
    AUDIT,
    ClusterNetworkPolicyStatus,
    EgressPolicyStatus,
    EgressSourceStatus,
    PolicyStatus,
    RulesReport,
    RuleStatus,
)
from agent.listing import listed
from agent.operate.cli.commands.options import PodFilter
from agent.operate.cli.output import Column, Screen, Signal


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyRow:
    """One rule of one policy."""

    policy: PolicyStatus
    rule: RuleStatus


def _hits_text(row: PolicyRow) -> str | int:
    """Of a policy that only counts, what it would admit is not what it has admitted."""
    hits = row.rule.hits
    return f"({hits})" if row.policy.action == AUDIT else hits


RULES: tuple[Column[PolicyRow], ...] = (
    Column("POLICY", lambda row: row.policy.name),
    Column(
        "FROM",
        lambda row: row.rule.source,
        signal=lambda row: Signal.CAUTION if row.rule.problem else None,
    ),
    Column("TO", lambda row: ports_text(row.rule)),
    Column("HITS", _hits_text),
    Column("PODS", lambda row: listed(row.policy.pods) or "none here", is_below=True),
    Column("POLICY FROM", lambda row: row.policy.source, is_wide=True, is_below=True),
)


NETWORK_POLICIES: tuple[Column[ClusterNetworkPolicyStatus], ...] = (
    Column("CLUSTERNETWORKPOLICY", lambda one: one.name),
    Column("TIER", lambda one: one.tier),
    Column("PRIORITY", lambda one: one.priority),
    Column("PODS", lambda one: listed(one.pods) or "none here", is_below=True),
    Column("DENIED", lambda one: listed(one.denied), is_below=True),
    Column("NODE TRAFFIC", lambda one: one.meaning, is_below=True),
)


EGRESS: tuple[Column[EgressPolicyStatus], ...] = (
    Column("EGRESS POLICY", lambda policy: policy.name),
    Column(
        "ACTION",
        lambda policy: policy.action,
        signal=lambda policy: Signal.CAUTION if policy.action == AUDIT else None,
    ),
    Column("WOULD DENY", lambda policy: policy.would_drop),
    Column("DENIED", lambda policy: policy.drop),
    Column("SUBJECTS", lambda policy: listed(policy.subjects), is_below=True),
    Column("EXCEPT", lambda policy: listed(policy.excepted), is_wide=True, is_below=True),
    Column("DESTINATIONS", lambda policy: listed(policy.denied), is_below=True),
    Column("POLICY FROM", lambda policy: policy.source, is_wide=True, is_below=True),
)


@dataclasses.dataclass(frozen=True, slots=True)
class EgressSourceRow:
    """What one subject of one policy attempted."""

    policy: str
    source: EgressSourceStatus


EGRESS_SOURCES: tuple[Column[EgressSourceRow], ...] = (
    Column("EGRESS POLICY", lambda row: row.policy),
    Column("VERDICT", lambda row: row.source.verdict),
    Column("PROTOCOL", lambda row: row.source.protocol),
    Column("ATTEMPTS", lambda row: row.source.attempts),
    Column("LAST", lambda row: row.source.last),
    Column("PROCESS", lambda row: row.source.process),
    Column("CGROUP", lambda row: row.source.cgroup, is_below=True),
)


def chosen(report: RulesReport, pods: PodFilter) -> RulesReport:
    """With the policies of these pods only; all if no pods are named."""
    if pods == PodFilter("", ""):
        return report
    found = [
        msgspec.structs.replace(policy, pods=names)
        for policy in report.policies
        if (names := [name for name in policy.pods if pods.matches(*_parts(name))])
    ]
    of_cluster = [
        msgspec.structs.replace(
            policy,
            pods=names,
            denied=[name for name in policy.denied if name in names],
        )
        for policy in report.cluster_network_policies
        if (names := [name for name in policy.pods if pods.matches(*_parts(name))])
    ]
    return msgspec.structs.replace(report, policies=found, cluster_network_policies=of_cluster)


def show(screen: Screen, report: RulesReport, found: Sequence[PolicyRow]) -> None:
    """Print each rule of each policy, and the problems."""
    if not report.sources:
        screen.line("The agent runs without --rules: only the kubelet is admitted.")
    elif not report.policies:
        screen.line(f"No HostAccessPolicy of {' or '.join(report.sources)} is in force.")
    else:
        screen.table(RULES, found)
    for policy in report.policies:
        if policy.action == AUDIT:
            packets = sum(rule.hits for rule in policy.rules)
            screen.line(
                f"Policy {policy.name} has action Audit: it admits nothing, and would have "
                f"admitted {packets} of the observed packets.",
                Signal.CAUTION,
            )
        elif policy.expires:
            screen.line(f"Policy {policy.name} admits its sources until {policy.expires}.")
    _show_egress(screen, report.egress)
    if report.cluster_network_policies:
        screen.line()
        screen.table(NETWORK_POLICIES, report.cluster_network_policies)
    absent = [rule.problem for policy in report.policies for rule in policy.rules if rule.problem]
    for problem in (*report.problems, *dict.fromkeys(absent)):
        screen.line(problem, Signal.CAUTION)


def _show_egress(screen: Screen, policies: Sequence[EgressPolicyStatus]) -> None:
    if not policies:
        return
    screen.line()
    screen.table(EGRESS, policies)
    if sources := [EgressSourceRow(one.name, source) for one in policies for source in one.sources]:
        screen.line()
        screen.table(EGRESS_SOURCES, sources)
    for policy in policies:
        for problem in policy.problems:
            screen.line(f"HostEgressPolicy {policy.name}: {problem}", Signal.CAUTION)


def rows(policies: list[PolicyStatus]) -> list[PolicyRow]:
    return [PolicyRow(policy, rule) for policy in policies for rule in policy.rules]


def ports_text(rule: RuleStatus) -> str:
    """As "tcp 80,443", "tcp" or "anything"."""
    if rule.ports == "any":
        return "anything" if rule.protocol == "any" else rule.protocol
    return f"{rule.protocol} {rule.ports}"


def _parts(name: str) -> tuple[str, str]:
    namespace, _, own = name.rpartition("/")
    return namespace, own
