"""Which policies have had an effect on this node: pods that they select, sources and ports found.

Of each rule the best that was ever seen counts, for one version of its policy: pods and services
come and go, and a misspelt name never has an effect.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from agent.kube.node_report import Effect
from agent.pods.pod import Pod
from agent.policy.api_source import SOURCE
from agent.policy.api_types import Policy, PolicyRule
from agent.policy.matching import RuleSet

# After a start, or with a new policy, pods and the units of its sources may start later.
_SETTLE_SECONDS = 60.0
_MAX_ENCODED = 4096
"""Characters in a node's report: some 1,000 policies. A node with more reports none."""


@dataclasses.dataclass(frozen=True, slots=True)
class _PolicyRecord:
    """One version of a policy. since: of the clock; effects: in the order of its rules."""

    policy: Policy
    since: float
    effects: tuple[Effect, ...]


class PolicyEffects:
    """What was seen of each policy. `update` is called by one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rule_set = RuleSet()
        self._records: dict[str, _PolicyRecord] = {}

    def update(self, rule_set: RuleSet, pods: Collection[Pod]) -> None:
        """pods: those with a network of their own. Only policies without an effect take time."""
        records = {policy.name: self._record(policy) for policy in rule_set.policies}
        selected: dict[str, list[Pod]] = {
            name: [] for name, record in records.items() if min(record.effects) < Effect.ADMITS
        }
        for pod in pods if selected else ():
            for policy in rule_set.selected.of(pod):
                if policy.name in selected:
                    selected[policy.name].append(pod)
        for name, found in selected.items():
            if found:
                record = records[name]
                effects = tuple(
                    effect if effect is Effect.ADMITS else _effect(rule_set, rule, found)
                    for rule, effect in zip(record.policy.rules, record.effects, strict=True)
                )
                records[name] = dataclasses.replace(record, effects=effects)
        self._records, self._rule_set = records, rule_set

    def _record(self, policy: Policy) -> _PolicyRecord:
        before = self._records.get(policy.name)
        if before is not None and before.policy == policy:
            return before
        return _PolicyRecord(policy, self._clock(), (Effect.NO_POD,) * len(policy.rules))

    def encoded(self, names: Sequence[str]) -> str:
        """For the node's report: the effects of these policies' rules as digits, policies by
        commas; nothing of one that does not select the node."""
        records = self._records
        text = ",".join(
            "".join(str(int(effect)) for effect in records[name].effects) if name in records else ""
            for name in names
        )
        return text if len(text) <= _MAX_ENCODED else ""

    def problems(self) -> Iterator[str]:
        """One sentence for each policy of this node's files without an effect. Those of the API
        server are for all nodes, and the default rules for programs that it may not have."""
        for record in self._records.values():
            policy = record.policy
            is_default = ":" in policy.name
            is_new = self._clock() - record.since < _SETTLE_SECONDS
            if is_new or is_default or policy.source == SOURCE:
                continue
            if max(record.effects) is Effect.NO_POD:
                yield f"Policy {policy.name} of {policy.source} selects no pod of this node."
                continue
            for rule, effect in zip(policy.rules, record.effects, strict=True):
                if effect is not Effect.ADMITS:
                    why = self._rule_set.problem(rule) or no_port(rule)
                    yield f"Policy {policy.name} of {policy.source}: {why}"


def no_port(rule: PolicyRule) -> str:
    """Why a rule whose source is found admits nothing."""
    return f"No pod that it selects has a {rule.protocol_text} port named {rule.port_name}."


def _effect(rule_set: RuleSet, rule: PolicyRule, pods: Sequence[Pod]) -> Effect:
    # Only a port's name depends on the pod.
    compared = pods if rule.port_name else pods[:1]
    admits = any(True for pod in compared for _ in rule_set.pack(rule, pod))
    return Effect.ADMITS if admits else Effect.NO_SOURCE
