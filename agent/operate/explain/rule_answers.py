"""The rules of a gate in words, each with why it does not match. Pure functions."""

from collections.abc import Callable, Iterable

from agent.operate.explain.model import RuleAnswer
from bpf.rule_evaluation import NewFlow, is_destination, is_protocol, is_source
from bpf.rules import Rule, SourceKind

PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmpv6", 132: "sctp"}

PathOf = Callable[[int], str]
"""The path of a cgroup by its id."""
PolicyOf = Callable[[int], str]
"""The policy of a rule by the key of its hit counter; empty if it is not known."""


def answers(
    rules: Iterable[Rule], flow: NewFlow, *, path_of: PathOf, policy_of: PolicyOf
) -> list[RuleAnswer]:
    """All rules, in the order in which they are compared."""
    return [
        RuleAnswer(
            source=_source_text(rule, path_of),
            protocol=PROTOCOLS.get(rule.protocol, str(rule.protocol)) if rule.protocol else "any",
            ports=rule.ports_text,
            policy=policy_of(rule.id) if rule.id else "",
            mismatch=_mismatch(rule, flow),
        )
        for rule in rules
    ]


def _mismatch(rule: Rule, flow: NewFlow) -> str:
    """Why the rule does not match, in a phrase; empty if it does."""
    if not is_source(rule, flow):
        return "another source"
    if not is_protocol(rule, flow):
        return "another protocol"
    return "" if is_destination(rule, flow) else "another port"


def _source_text(rule: Rule, path_of: PathOf) -> str:
    """The source that a rule admits, in words."""
    match rule.source:
        case SourceKind.ANY:
            return "any host process"
        case SourceKind.KUBELET:
            return "the kubelet"
        case SourceKind.CGROUP:
            return f"cgroup {path_of(rule.cgroup)}"
        case SourceKind.ANCESTOR:
            return f"cgroup {path_of(rule.cgroup)} and below"
    return "the host kernel"
