"""Metrics of policies."""

from collections.abc import Iterator

from prometheus_client import core

from agent.metrics import MetricFamily, labelled, single
from agent.policy.controller import PolicyController
from agent.policy.rules_report import RuleSample

RULE_HITS = MetricFamily(
    "podgate_rule_hits_total",
    "counter",
    "New flows admitted by a rule, over all gates.",
    ("policy", "source", "protocol", "ports"),
)
POLICY_PROBLEMS = MetricFamily(
    "podgate_policy_problems",
    "gauge",
    "Policies, or policy sources, that are not applied as written; `podgate rules` lists them.",
)
POLICY_EXPIRES = MetricFamily(
    "podgate_policy_expires_timestamp_seconds",
    "gauge",
    "When a policy in force with spec.expires stops admitting its sources, as Unix time.",
    ("policy",),
)
RULES_SKIPPED = MetricFamily(
    "podgate_rules_skipped",
    "gauge",
    "Rules that matching pods' gates have no room for, over all gates.",
    ("policy",),
)


class PolicyCollector:
    """`refresh` it before each scrape: hits are read in a thread."""

    def __init__(self, policy: PolicyController) -> None:
        self._policy = policy
        self._samples: list[RuleSample] = []

    async def refresh(self) -> None:
        self._samples = await self._policy.samples()

    def collect(self) -> Iterator[core.Metric]:
        yield labelled(
            RULE_HITS,
            (
                ((rule.policy, rule.source, rule.protocol, rule.ports), rule.hits)
                for rule in self._samples
            ),
        )
        yield labelled(
            RULES_SKIPPED,
            (((policy,), count) for policy, count in self._policy.skipped.items()),
        )
        yield labelled(
            POLICY_EXPIRES, (((policy,), at) for policy, at in self._policy.expiries.items())
        )
        yield single(POLICY_PROBLEMS, len(self._policy.problems))
