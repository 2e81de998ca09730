"""Output of `podgate rules`."""

import dataclasses
from collections.abc import Sequence

import msgspec

from agent.admin.report import AUDIT, PolicyStatus, RulesReport, RuleStatus
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


def chosen(report: RulesReport, pods: PodFilter) -> RulesReport:
    """With the policies of these pods only; all if no pods are named."""
    if pods == PodFilter("", ""):
        return report
    found = [
        msgspec.structs.replace(policy, pods=names)
        for policy in report.policies
        if (names := [name for name in policy.pods if pods.matches(*_parts(name))])
    ]
    return msgspec.structs.replace(report, policies=found)


def show(screen: Screen, report: RulesReport, found: Sequence[PolicyRow]) -> None:
    """Print each rule of each policy, and the problems."""
    if not report.sources:
        screen.line("The agent runs without --rules: only the kubelet is admitted.")
    elif not report.policies:
        screen.line(f"No policy of {' or '.join(report.sources)} is in force.")
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
    absent = [rule.problem for policy in report.policies for rule in policy.rules if rule.problem]
    for problem in (*report.problems, *dict.fromkeys(absent)):
        screen.line(problem, Signal.CAUTION)


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
