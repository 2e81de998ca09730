"""Review of what nodes have observed: what policies admit already, what is suggested, and what
given policies would drop or admit for nothing."""

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Sequence

import msgspec

from agent.admin.observations import Observations, ObservedFlows
from agent.drops.merging import flow_key
from agent.policy import api_types, replay, suggested_yaml, suggestions
from agent.policy.api_types import HostAccessPolicy, Policy, PolicyRule
from agent.policy.kinds import PolicyError
from agent.policy.suggestions import Suggestion


@dataclasses.dataclass(frozen=True, slots=True)
class FlowFilter:
    """Which flows are reviewed. namespaces, pod: of the target, all if empty; since: last seen not
    before; min_count: packets at least, of one source and port on one node."""

    namespaces: frozenset[str] = frozenset()
    pod: str = ""
    since: datetime.datetime | None = None
    min_count: int = 1

    def matches(self, flows: ObservedFlows) -> bool:
        return (
            (not self.namespaces or flows.pod.namespace in self.namespaces)
            and self.pod in ("", flows.pod.name)
            and (self.since is None or flows.last >= self.since)
            and flows.packets >= self.min_count
        )


class ReviewedFlows(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Flows of one node. is_admitted: by policies in force there; is_listed: these name the source
    for the pod, to this port or another; is_kubelet: the source is the kubelet; doubt: why no
    policy is suggested without a decision, or empty; text: source and target in words."""

    node: str
    flows: ObservedFlows
    is_admitted: bool
    is_listed: bool
    is_kubelet: bool
    doubt: str
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class UnusedRule:
    """A rule that has admitted nothing, and would have."""

    policy: str
    rule: PolicyRule


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFlows:
    """What one node observed, without what its filter leaves out."""

    observations: Observations
    policies: tuple[Policy, ...]
    flows: tuple[ObservedFlows, ...]


class Review:
    """The observations of one or more nodes."""

    def __init__(self, nodes: Iterable[Observations], chosen: FlowFilter) -> None:
        self.nodes = [_of_node(observations, chosen) for observations in nodes]

    @property
    def observed(self) -> datetime.timedelta:
        """The longest time that a node observed."""
        seconds = (node.observations.observed_seconds for node in self.nodes)
        return datetime.timedelta(seconds=max(seconds, default=0.0))

    def admitted(self) -> list[ObservedFlows]:
        """Flows that policies in force admit by now, by node."""
        return [
            flows
            for node in self.nodes
            for flows in node.flows
            if replay.is_admitted(node.policies, flows)
        ]

    def suggestions(self) -> list[Suggestion]:
        """For what policies in force do not admit."""
        return self._suggest(lambda node: node.policies)

    def dropped(self, policies: Sequence[Policy]) -> list[Suggestion]:
        """For what these policies would not admit."""
        return self._suggest(lambda node: in_force(policies, node.observations))

    def staged(self, policies: Sequence[Policy]) -> list[Suggestion]:
        """For what only those of them with action Audit would admit."""
        left = [
            flows
            for node in self.nodes
            for chosen in [in_force(policies, node.observations)]
            for flows in node.flows
            if replay.is_admitted(chosen, flows)
            and not replay.is_admitted([one for one in chosen if not one.is_staged], flows)
        ]
        return suggestions.suggest(left, self.observed)

    def unused(self, policies: Iterable[Policy]) -> list[UnusedRule]:
        """Rules for which no flow was seen and no hit counted."""
        hits = {
            (policy.name, rule.source, rule.protocol, rule.ports)
            for node in self.nodes
            for policy in node.observations.rules
            for rule in policy.rules
            if rule.hits
        }
        return [
            UnusedRule(policy.name, rule)
            for policy in policies
            for rule in policy.rules
            if (policy.name, str(rule.source), rule.protocol_text, rule.ports_text) not in hits
            and not self._has_flow(policy, rule)
        ]

    def flows(self) -> list[ReviewedFlows]:
        """All flows of all nodes, each with what follows from it."""
        doubts = {
            flow_key(flows): suggestion.doubt
            for suggestion in self._suggest(lambda _: ())
            for flows in suggestion.flows
        }
        return [
            ReviewedFlows(
                node=node.observations.node,
                flows=flows,
                is_admitted=replay.is_admitted(node.policies, flows),
                is_listed=replay.is_listed(node.policies, flows),
                is_kubelet=flows.cgroup == node.observations.kubelet,
                doubt=doubts[flow_key(flows)],
                text=suggested_yaml.in_words(flows),
            )
            for node in self.nodes
            for flows in node.flows
        ]

    def _suggest(self, policies_of: Callable[[NodeFlows], Iterable[Policy]]) -> list[Suggestion]:
        left = [
            flows
            for node in self.nodes
            for policies in [tuple(policies_of(node))]
            for flows in node.flows
            if not replay.is_admitted(policies, flows)
        ]
        return suggestions.suggest(left, self.observed)

    def _has_flow(self, policy: Policy, rule: PolicyRule) -> bool:
        return any(
            rule in replay.admitting_rules(policy, flows)
            for node in self.nodes
            if in_force([policy], node.observations)
            for flows in node.flows
        )


def in_force(policies: Iterable[Policy], observations: Observations) -> tuple[Policy, ...]:
    """Those policies that select the node."""
    return tuple(
        policy
        for policy in policies
        if policy.nodes is None or policy.nodes.matches(observations.node_labels)
    )


def _of_node(observations: Observations, chosen: FlowFilter) -> NodeFlows:
    policies = []
    for document in observations.policies:
        try:
            # Without a check of the name: those of default rules are none of the API.
            read = msgspec.convert(document, HostAccessPolicy)
            policies.append(api_types.compiled(read, source="in force"))
        except (msgspec.ValidationError, PolicyError):
            # Of an agent of another version: what it admits is suggested once more.
            continue
    flows = [
        msgspec.structs.replace(flows, nodes=(observations.node,) if observations.node else ())
        for flows in observations.flows
        if chosen.matches(flows)
    ]
    return NodeFlows(observations, tuple(policies), tuple(flows))
