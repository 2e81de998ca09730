"""Which rule of a gate admits a source: the twin of bpf/src/rules.h. Pure functions.

Tests run the gate's own program on the same facts and compare each verdict.
"""

from collections.abc import Callable

from agent.operate.explain.facts import KERNEL, Cgroup, Flow, GateFacts, NodeFacts, Source
from agent.operate.explain.model import RuleAnswer
from bpf.rules import MAX_PORT, Rule, SourceKind

PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmpv6", 132: "sctp"}

PathOf = Callable[[int], str]
"""The path of a cgroup by its id."""
PolicyOf = Callable[[int], str]
"""The policy of a rule by the key of its hit counter; empty if it is not known."""


def is_stale(node: NodeFacts, now_ns: int) -> bool:
    """`is_stale`: no heartbeat for so long that the kubelet may have another cgroup."""
    return bool(
        node.heartbeat_ns
        and node.stale_after_ns
        and node.heartbeat_age_ns(now_ns) >= node.stale_after_ns
    )


def is_dead_man_expired(node: NodeFacts, now_ns: int) -> bool:
    """`is_dead_man_expired`: all gates are open."""
    return bool(
        node.heartbeat_ns and node.dead_man_ns and node.heartbeat_age_ns(now_ns) > node.dead_man_ns
    )


def is_kubelet_cgroup(node: NodeFacts, cgroup: Cgroup | None) -> bool:
    """`is_kubelet_cgroup`: that of the agent's search, or the unit's made since."""
    return cgroup is not None and cgroup.id in {node.kubelet_cgroup, node.remade_cgroup} - {0}


def is_in_pod(node: NodeFacts, cgroup: Cgroup) -> bool:
    """Whether the cgroup is below that of all pods; False if that is unknown."""
    return bool(node.pods_cgroup) and cgroup.ancestor(node.pods_level) == node.pods_cgroup


def may_be_kubelet(node: NodeFacts, cgroup: Cgroup | None, now_ns: int) -> bool:
    """`may_be_kubelet`: the kubelet, or any process outside pods while it is not identified."""
    if cgroup is None:
        return False
    if is_kubelet_cgroup(node, cgroup):
        return True
    if node.has_kubelet and (node.is_unit_followed or not is_stale(node, now_ns)):
        return False
    return not is_in_pod(node, cgroup)


def mismatch(rule: Rule, source: Source, flow: Flow, *, is_kubelet: bool) -> str:
    """Why `match_rules` does not match this rule, in a phrase; empty if it does."""
    if not _is_source(rule, source, is_kubelet=is_kubelet):
        return "another source"
    if rule.protocol not in (0, flow.protocol):
        return "another protocol"
    if not rule.first_port <= flow.port <= rule.last_port:
        return "another port"
    return ""


def find_rule(
    gate: GateFacts, source: Source, flow: Flow, *, is_kubelet: bool, is_hook: bool = False
) -> Rule | None:
    """`find_rule`: the first that matches. A hook runs for processes, never for the kernel."""
    return next(
        (
            rule
            for rule in gate.rules
            if not mismatch(rule, source, flow, is_kubelet=is_kubelet)
            and not (is_hook and rule.source is SourceKind.KERNEL)
        ),
        None,
    )


def answers(
    gate: GateFacts,
    source: Source,
    flow: Flow,
    *,
    is_kubelet: bool,
    path_of: PathOf,
    policy_of: PolicyOf,
) -> list[RuleAnswer]:
    """All rules of a gate, in the order in which they are compared."""
    return [
        RuleAnswer(
            source=source_text(rule, path_of),
            protocol=PROTOCOLS.get(rule.protocol, str(rule.protocol)) if rule.protocol else "any",
            ports=ports_text(rule),
            policy=policy_of(rule.id) if rule.id else "",
            mismatch=mismatch(rule, source, flow, is_kubelet=is_kubelet),
        )
        for rule in gate.rules
    ]


def source_text(rule: Rule, path_of: PathOf) -> str:
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


def ports_text(rule: Rule) -> str:
    if (rule.first_port, rule.last_port) == (0, MAX_PORT):
        return "any"
    if rule.first_port == rule.last_port:
        return str(rule.first_port)
    return f"{rule.first_port}-{rule.last_port}"


def _is_source(rule: Rule, source: Source, *, is_kubelet: bool) -> bool:
    match rule.source:
        case SourceKind.ANY:
            return True
        case SourceKind.KUBELET:
            return is_kubelet
        case SourceKind.CGROUP:
            return source.cgroup is not None and source.cgroup.id == rule.cgroup
        case SourceKind.ANCESTOR:
            return source.cgroup is not None and source.cgroup.ancestor(rule.level) == rule.cgroup
    return source.origin == KERNEL
