"""Replay of observed flows against policies: what each policy would have admitted."""

from collections.abc import Iterable, Iterator

from agent.admin.observations import ObservedFlows, ObservedPod
from agent.drops.source_processes import NO_SOCKET
from agent.policy.api_types import Policy, PolicyRule, RuleSource
from bpf.rules import MAX_PORT

# The kubelet's directories, which are slices, too (agent/policy/source_cgroups.py).
_PODS = "kubepods.slice"
UNITS = (".service", ".scope")
"""Units that processes are in."""


def selects(policy: Policy, pod: ObservedPod) -> bool:
    return policy.pods.matches(pod.namespace, pod.labels, pod.namespace_labels)


def admitting_rules(policy: Policy, flows: ObservedFlows) -> Iterator[PolicyRule]:
    """The rules of a policy that admit these flows, if it selects the pod."""
    if selects(policy, flows.pod):
        for rule in policy.rules:
            if _has_port(rule, flows) and _is_source(policy, rule.source, flows):
                yield rule


def is_admitted(policies: Iterable[Policy], flows: ObservedFlows) -> bool:
    return any(True for policy in policies for _ in admitting_rules(policy, flows))


def is_listed(policies: Iterable[Policy], flows: ObservedFlows) -> bool:
    """Whether a policy names the source, to any port of the pod."""
    return any(
        _is_source(policy, rule.source, flows)
        for policy in policies
        if selects(policy, flows.pod)
        for rule in policy.rules
    )


def units(path: str) -> Iterator[str]:
    """The units of systemd that a cgroup belongs to: its slices, and then its service or scope."""
    for part in path.split("/")[1:]:
        if part.endswith(UNITS):
            yield part
        if not part.endswith(".slice") or part == _PODS:
            return
        yield part


def _has_port(rule: PolicyRule, flows: ObservedFlows) -> bool:
    if rule.protocol not in (0, flows.protocol):
        return False
    if flows.has_many_ports:
        return not rule.port_name and (rule.first_port, rule.last_port) == (0, MAX_PORT)
    if rule.port_name:
        return (rule.port_name, rule.protocol_text, flows.port) in flows.pod.named_ports
    return rule.first_port <= flows.port <= rule.last_port


def _is_source(policy: Policy, source: RuleSource, flows: ObservedFlows) -> bool:
    path = flows.cgroup
    match source.kind:
        case "any":
            return True
        case "kernel":
            return path == NO_SOCKET
        case "exact":
            return path == source.name
        case "subtree":
            return path == source.name or path.startswith(f"{source.name.rstrip('/')}/")
        case "unit":
            return source.name in units(path)
        case "pods":
            pod, selector = flows.source_pod, policy.host_pods[source.name]
            return (
                pod is not None
                and pod.host_network
                and selector.matches(pod.namespace, pod.labels, pod.namespace_labels)
            )
