"""Policies that almost admit a flow: all but one thing of them matches. Pure functions."""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping

from agent.admin.observations import ObservedFlows, ObservedPod
from agent.listing import listed
from agent.policy import replay, suggested_yaml
from agent.policy.api_types import Policy, PolicyRule, RuleSource
from agent.policy.selectors import LabelSelector, PodSelector


class Miss(enum.Enum):
    """What of a policy does not match, the most likely mistake first."""

    NOTHING = "nothing"
    """It matches, and the gate does not have its rule."""
    ACTION = "action"
    PORT = "port"
    SOURCE = "source"
    POD = "pod"
    NODE = "node"


@dataclasses.dataclass(frozen=True, slots=True)
class NearMiss:
    """text: what the policy admits, and why not this flow; a sentence without its subject, which is
    the policy."""

    policy: str
    miss: Miss
    text: str


def near_misses(
    policies: Iterable[Policy], flows: ObservedFlows, node_labels: Mapping[str, str]
) -> list[NearMiss]:
    """Of policies for this and other nodes, for flows that no rule of the gate admits."""
    found = {
        miss
        for policy in policies
        for source in {rule.source for rule in policy.rules}
        for miss in _misses(policy, source, flows, node_labels)
    }
    order = list(Miss)
    return sorted(found, key=lambda one: (order.index(one.miss), one.policy, one.text))


def _misses(
    policy: Policy, source: RuleSource, flows: ObservedFlows, node_labels: Mapping[str, str]
) -> Iterator[NearMiss]:
    """At most one, for the rules with this source."""
    rules = [rule for rule in policy.rules if rule.source == source]
    target = suggested_yaml.port_text(flows)
    texts: dict[Miss, str] = {}
    if not replay.names_source(policy, source, flows):
        why = _other_source(policy, source, flows)
        if not why:
            return
        texts[Miss.SOURCE] = f"admits {source} to {target}, and {why}"
    if not any(replay.has_destination(rule, flows) for rule in rules):
        admitted = listed([_ports_text(rule, flows.pod) for rule in rules])
        texts[Miss.PORT] = f"admits this source to {admitted}, not to {target}"
    if why := _other_pod(policy.pods, flows.pod, "the pod"):
        texts[Miss.POD] = f"admits this source to {target} of other pods: {why}"
    if policy.nodes is not None and (why := _other_labels(policy.nodes, node_labels, "this node")):
        texts[Miss.NODE] = f"admits this source to {target} on other nodes: {why}"
    if policy.is_staged:
        texts[Miss.ACTION] = "would admit this, and its action is Audit: it only counts"
    if not texts:
        text = "admits this, and the gate does not have its rule; 'podgate rules' shows why"
        yield NearMiss(policy.name, Miss.NOTHING, text)
    elif len(texts) == 1:
        ((miss, text),) = texts.items()
        yield NearMiss(policy.name, miss, text)


def _other_source(policy: Policy, source: RuleSource, flows: ObservedFlows) -> str:
    """Why a source that is like the named one is another; empty if it is not like it."""
    path, pod = flows.cgroup, flows.source_pod
    match source.kind:
        case "exact" if path.startswith(f"{source.name.rstrip('/')}/"):
            return f"the source is in {path}, which 'match: subtree' includes"
        case "exact" | "subtree" if source.name.startswith(f"{path.rstrip('/')}/") and path != "/":
            return f"the source is in {path}, above that"
        case "unit":
            stem = _stem(source.name)
            same = [unit for unit in replay.units(path) if _stem(unit) == stem]
            return f"the source is in unit {same[-1]}" if same else ""
        case "pods" if pod is not None and pod.host_network:
            selector = policy.host_pods[source.name]
            fields = _differing(selector, pod, "the source")
            return fields[0] if len(fields) == 1 else ""
    return ""


def _other_pod(selector: PodSelector, pod: ObservedPod, subject: str) -> str:
    return "; ".join(_differing(selector, pod, subject))


def _differing(selector: PodSelector, pod: ObservedPod, subject: str) -> list[str]:
    """Of each field that does not match, why."""
    found = []
    if selector.namespaces is not None and pod.namespace not in selector.namespaces:
        names = listed(list(selector.namespaces))
        found.append(f"{subject} is in namespace {pod.namespace}, not in {names}")
    if selector.pod_selector and (why := _other_labels(selector.pod_selector, pod.labels, subject)):
        found.append(why)
    namespace = f"namespace {pod.namespace}"
    if selector.namespace_selector and (
        why := _other_labels(selector.namespace_selector, pod.namespace_labels, namespace)
    ):
        found.append(why)
    return found


def _other_labels(selector: LabelSelector, labels: Mapping[str, str], subject: str) -> str:
    """The first requirement that the labels do not meet; empty if they meet all."""
    for key, value in selector.match_labels.items():
        if labels.get(key) != value:
            has = f"the label {key}={labels[key]}" if key in labels else f"no label {key}"
            return f"{subject} has {has}, not {key}={value}"
    for one in selector.match_expressions:
        if not one.matches(labels):
            has = f"the label {one.key}={labels[one.key]}" if one.key in labels else "no such label"
            values = f" ({', '.join(one.values)})" if one.values else ""
            return f"{subject} has {has}, and {one.key} must be {one.operator}{values}"
    return ""


def _ports_text(rule: PolicyRule, pod: ObservedPod) -> str:
    if rule.port_name:
        numbers = replay.port_numbers(rule, pod)
        which = ", ".join(map(str, numbers)) if numbers else "which the pod does not declare"
        return f"{rule.protocol_text} {rule.port_name} ({which})"
    ports = rule.ports_text
    return rule.protocol_text if ports == "any" else f"{rule.protocol_text} {ports}"


def _stem(unit: str) -> str:
    """Without the type, and of a template's unit without the instance."""
    return unit.rpartition(".")[0].partition("@")[0]
