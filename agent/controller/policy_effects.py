"""Whether a policy has an effect on any node, from the nodes' reports. Pure functions."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from agent.controller.policy_revisions import PolicyRevisions
from agent.kube.node_report import Effect, NodePolicies
from agent.listing import listed

NO_POD, NO_SOURCE = "NoPodSelected", "NoSourceFound"
REASONS = (NO_POD, NO_SOURCE)


def problem(
    name: str,
    rules: Sequence[str],
    nodes: Collection[str],
    reports: Mapping[str, NodePolicies],
    revisions: PolicyRevisions,
) -> tuple[str, str] | None:
    """The reason and a clause if the policy, or one of its rules, has no effect on any node; two
    empty strings if it has; None while a node has not reported it.

    rules: in words; nodes: selected ones; reports: by node.
    """
    found = [_effects(name, len(rules), reports.get(node), revisions) for node in nodes]
    reported = [effects for effects in found if effects]
    if not reported or len(reported) < len(found):
        return None
    best = [max(of_rule) for of_rule in zip(*reported, strict=True)]
    if max(best) is Effect.NO_POD:
        return NO_POD, "it selects no pod of these"
    missing = [rule for rule, effect in zip(rules, best, strict=True) if effect < Effect.ADMITS]
    if missing:
        return NO_SOURCE, f"no node has the source or port of: {listed(missing)}"
    return "", ""


def _effects(
    name: str, count: int, report: NodePolicies | None, revisions: PolicyRevisions
) -> list[Effect]:
    """Of the policy's rules on one node; none if they are not known."""
    if report is None or report.revision != revisions.current:
        return []
    effects = dict(_decoded(report.effects, revisions.names)).get(name, "")
    is_readable = len(effects) == count and set(effects) <= {str(int(one)) for one in Effect}
    return [Effect(int(one)) for one in effects] if is_readable else []


def _decoded(text: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """By policy. Another version of podgate may report other rules."""
    parts = text.split(",")
    return zip(names, parts, strict=True) if len(parts) == len(names) else iter(())
