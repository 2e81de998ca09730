"""What `podgate rules` shows of a rule set, and the hits of its rules."""

from collections.abc import Mapping, Sequence

import msgspec

from agent.admin.report import PolicyStatus, RulesReport, RuleStatus
from agent.pods.pod import Pod
from agent.pods.pod_state import Admission
from agent.policy.effective import EffectivePolicies
from agent.policy.matching import RuleSet


class RuleSample(msgspec.Struct, frozen=True):
    """The hits of one rule."""

    policy: str
    source: str
    protocol: str
    ports: str
    hits: int


def samples(rule_set: RuleSet, hits: Mapping[int, int]) -> list[RuleSample]:
    """Of every rule with a counter. hits: by the rule's id."""
    return [
        RuleSample(policy, str(rule.source), rule.protocol_text, rule.ports_text, hits[number])
        for (policy, rule), number in rule_set.ids.items()
        if number in hits
    ]


def of(
    rule_set: RuleSet,
    gated: Sequence[tuple[Pod, Admission | None]],
    effective: EffectivePolicies,
    hits: Mapping[int, int],
) -> RulesReport:
    """gated: the pods with gates, and what theirs have; takes milliseconds for each policy."""
    found = [
        PolicyStatus(
            name=policy.name,
            source=policy.source,
            pods=sorted(pod.full_name for pod, _ in gated if policy in rule_set.selected.of(pod)),
            rules=[
                RuleStatus(
                    source=str(rule.source),
                    protocol=rule.protocol_text,
                    ports=rule.ports_text,
                    hits=hits.get(rule_set.ids[policy.name, rule], 0),
                    problem=rule_set.problem(rule),
                )
                for rule in policy.rules
            ],
            generation=policy.generation,
            expires=policy.expires_text,
            skipped={
                pod.full_name: count
                for pod, admission in gated
                if admission and (count := admission.skipped.count(policy.name))
            },
        )
        for policy in rule_set.policies
    ]
    problems = effective.problems
    problems += [
        f"Policy {policy.name} expired at {policy.expires_text} and admits nothing; delete it, or "
        "set a later time in spec.expires."
        for policy in effective.expired
    ]
    problems += sorted(
        f"Pod {pod.full_name}: {admission.problem}"
        for pod, admission in gated
        if admission and admission.problem
    )
    return RulesReport(sources=effective.names, policies=found, problems=problems)
