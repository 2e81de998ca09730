"""Replay of observed flows against policies: what each policy would have admitted.

Policies become rules of a gate, and bpf/rule_evaluation.py evaluates these. A flow's cgroup is
known by its path alone, so the cgroups on that path are numbered from the root.
"""

from collections.abc import Iterable, Iterator

import msgspec

from agent.admin.observations import ObservedFlows, ObservedPod
from agent.drops.source_processes import NO_SOCKET
from agent.linux.cgroups import CgroupId
from agent.policy.api_types import Policy, PolicyRule, RuleSource
from agent.policy.matching import compared, packed
from bpf.rule_evaluation import Cgroup, NewFlow, find_rule, is_source
from bpf.rules import Rule

# The kubelet's directories, which are slices, too (agent/policy/source_cgroups.py).
_PODS = "kubepods.slice"
UNITS = (".service", ".scope")
"""Units that processes are in."""


def selects(policy: Policy, pod: ObservedPod) -> bool:
    return policy.pods.matches(pod.namespace, pod.labels, pod.namespace_labels)


def admitting_rules(policy: Policy, flows: ObservedFlows) -> Iterator[PolicyRule]:
    """The rules of a policy that admit these flows, if it selects the pod."""
    if selects(policy, flows.pod):
        flow = _new_flow(flows)
        for rule in policy.rules:
            named = port_numbers(rule, flows.pod)
            if find_rule(packed(rule, _cgroups(policy, rule.source, flows), named), flow):
                yield rule


def is_admitted(policies: Iterable[Policy], flows: ObservedFlows) -> bool:
    return any(True for policy in policies for _ in admitting_rules(policy, flows))


def is_listed(policies: Iterable[Policy], flows: ObservedFlows) -> bool:
    """Whether a policy names the source, to any port of the pod."""
    return any(
        names_source(policy, rule.source, flows)
        for policy in policies
        if selects(policy, flows.pod)
        for rule in policy.rules
        for kind, cgroup, level in compared(rule.source, _cgroups(policy, rule.source, flows))
    )


def names_source(policy: Policy, source: RuleSource, flows: ObservedFlows) -> bool:
    """Whether this source of the policy's rules is that of the flows."""
    return any(
        is_source(Rule(kind, cgroup=cgroup, level=level), _new_flow(flows))
        for kind, cgroup, level in compared(source, _cgroups(policy, source, flows))
    )


def has_destination(rule: PolicyRule, flows: ObservedFlows) -> bool:
    """Whether the rule admits to the flows' protocol and port, whatever source."""
    of_any = msgspec.structs.replace(rule, source=RuleSource("any"))
    return (
        find_rule(packed(of_any, (), port_numbers(rule, flows.pod)), _new_flow(flows)) is not None
    )


def port_numbers(rule: PolicyRule, pod: ObservedPod) -> list[int]:
    """The pod's ports with the name that the rule has; none for a rule without a name."""
    return [
        number
        for name, protocol, number in pod.named_ports
        if (name, protocol) == (rule.port_name, rule.protocol_text)
    ]


def units(path: str) -> Iterator[str]:
    """The units of systemd that a cgroup belongs to: its slices, and then its service or scope."""
    for part in path.split("/")[1:]:
        if part.endswith(UNITS):
            yield part
        if not part.endswith(".slice") or part == _PODS:
            return
        yield part


def _new_flow(flows: ObservedFlows) -> NewFlow:
    """To port 0 if it has many: rules for all ports alone include that."""
    ids = tuple(range(1, len(_above(flows.cgroup)) + 1))
    cgroup = Cgroup(ids[-1], flows.cgroup, ids) if ids else None
    return NewFlow(flows.protocol, flows.port, cgroup, is_kernel=flows.cgroup == NO_SOCKET)


def _cgroups(policy: Policy, source: RuleSource, flows: ObservedFlows) -> list[CgroupId]:
    """The source's cgroups, of those on the path of the flows'."""
    above, levels = _above(flows.cgroup), []
    match source.kind:
        case "exact" | "subtree" if source.name in above:
            levels = [above.index(source.name)]
        case "unit":
            levels = [at for at, name in enumerate(units(flows.cgroup), 1) if name == source.name]
        case "pods":
            pod, selector = flows.source_pod, policy.host_pods[source.name]
            if (
                pod is not None
                and pod.host_network
                and selector.matches(pod.namespace, pod.labels, pod.namespace_labels)
            ):
                levels = [len(above) - 1]
    return [CgroupId(level + 1, level) for level in levels]


def _above(path: str) -> list[str]:
    """Paths from the root down to this one; none if it is no path."""
    if not path.startswith("/"):
        return []
    parts = [part for part in path.split("/") if part]
    return [f"/{'/'.join(parts[:level])}" for level in range(len(parts) + 1)]
