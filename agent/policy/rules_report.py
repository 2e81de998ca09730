"""What `podgate rules` shows of a rule set, and the hits of its rules."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from agent.admin.report import PolicyStatus, RulesReport, RuleStatus
from agent.pods.pod import Pod
from agent.pods.pod_state import Admission
from agent.policy.api_types import Policy
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


def policy_status(
    policy: Policy,
    pods: Iterable[Pod],
    *,
    hits: Sequence[int],
    problems: Sequence[str],
    skipped: dict[str, int],
) -> PolicyStatus:
    """pods: those that it selects; hits, problems: of its rules, in their order; skipped: rules
    that a gate had no room for, by pod."""
    return PolicyStatus(
        name=policy.name,
        source=policy.source,
        pods=sorted(pod.full_name for pod in pods),
        rules=[
            RuleStatus(
                source=str(rule.source),
                protocol=rule.protocol_text,
                ports=rule.ports_text,
                hits=count,
                problem=problem,
            )
            for rule, count, problem in zip(policy.rules, hits, problems, strict=True)
        ],
        generation=policy.generation,
        skipped=skipped,
        expires=policy.expires_text,
        action=policy.document.spec.action,
    )


def of(
    rule_set: RuleSet,
    gated: Sequence[tuple[Pod, Admission | None]],
    effective: EffectivePolicies,
    hits: Mapping[int, int],
) -> RulesReport:
    """gated: the pods with gates, and what theirs have; takes milliseconds for each policy."""
    found = [
        policy_status(
            policy,
            [pod for pod, _ in gated if policy in rule_set.selected.of(pod)],
            hits=[hits.get(rule_set.ids[policy.name, rule], 0) for rule in policy.rules],
            problems=[rule_set.problem(rule) for rule in policy.rules],
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
