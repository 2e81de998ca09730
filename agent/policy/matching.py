"""Matches policies with pods and sources to compute each gate's rules. No I/O."""

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from agent.linux.cgroups import CgroupId
from agent.listing import listed
from agent.pods.object_labels import LabelSnapshot
from agent.pods.pod import Pod
from agent.pods.pod_state import Admission
from agent.policy.api_types import Policy, PolicyRule, RuleSource
from agent.policy.selectors import PodSelector
from bpf import abi
from bpf.rules import Rule, SourceKind

_Key = tuple[str, PolicyRule]


class SelectedPolicies:
    """The policies that select each pod, by the order of their names.

    A result is kept while the pod's labels are the same: sources change more often than these, and
    a thousand selectors of 250 pods take a second. Threads may use it at once.
    """

    def __init__(self, policies: Iterable[Policy], labels: LabelSnapshot) -> None:
        self._labels = labels
        self._anywhere: list[tuple[int, Policy]] = []
        self._in_namespace: dict[str, list[tuple[int, Policy]]] = collections.defaultdict(list)
        for place, policy in enumerate(policies):
            if policy.pods.namespaces is None:
                self._anywhere.append((place, policy))
            else:
                for namespace in set(policy.pods.namespaces):
                    self._in_namespace[namespace].append((place, policy))
        self._kept: dict[str, tuple[str, Mapping[str, str], tuple[Policy, ...]]] = {}

    def of(self, pod: Pod) -> tuple[Policy, ...]:
        kept = self._kept.get(pod.uid)
        if kept and kept[:2] == (pod.namespace, pod.labels):
            return kept[2]
        candidates = self._anywhere + self._in_namespace.get(pod.namespace, [])
        of_namespace = self._labels.of_namespace(pod.namespace)
        found = {
            place: policy
            for place, policy in candidates
            if policy.pods.matches(pod.namespace, pod.labels, of_namespace)
        }
        policies = tuple(found[place] for place in sorted(found))
        self._kept[pod.uid] = pod.namespace, pod.labels, policies
        return policies

    def retain(self, uids: set[str]) -> None:
        """Forget all other pods."""
        for uid in self._kept.keys() - uids:
            self._kept.pop(uid, None)


@dataclasses.dataclass(frozen=True, slots=True)
class RuleSet:
    """All policies in force on this node, and the current cgroups of their sources. Immutable."""

    policies: tuple[Policy, ...] = ()
    cgroups: Mapping[str, tuple[CgroupId, ...]] = dataclasses.field(default_factory=dict)
    """By `RuleSource.name`; without those of which there is none now."""
    ids: Mapping[_Key, int] = dataclasses.field(default_factory=dict)
    """Keys of the hit counters, one per rule and policy."""
    selected: SelectedPolicies = dataclasses.field(
        default_factory=lambda: SelectedPolicies((), LabelSnapshot()), compare=False
    )
    generation: int = dataclasses.field(default=0, compare=False)
    """Of those that replaced each other: another number, another rule set."""
    selected_since: int = dataclasses.field(default=0, compare=False)
    """The first generation with these policies and labels."""

    @classmethod
    def of(cls, policies: Iterable[Policy], labels: LabelSnapshot | None = None) -> "RuleSet":
        """Those policies that select the node, without cgroups."""
        labels = labels or LabelSnapshot()
        ordered = tuple(
            policy
            for policy in sorted(policies, key=lambda policy: policy.name)
            if policy.nodes is None or policy.nodes.matches(labels.node)
        )
        keys = ((policy.name, rule) for policy in ordered for rule in policy.rules)
        return cls(ordered, {}, _ids(keys), SelectedPolicies(ordered, labels))

    def with_policies(self, policies: Iterable[Policy], labels: LabelSnapshot) -> "RuleSet":
        """The next generation, with the same cgroups."""
        number = self.generation + 1
        return dataclasses.replace(
            RuleSet.of(policies, labels),
            cgroups=self.cgroups,
            generation=number,
            selected_since=number,
        )

    def with_cgroups(self, cgroups: Mapping[str, tuple[CgroupId, ...]]) -> "RuleSet":
        """The next generation; the same if they are the same."""
        if cgroups == self.cgroups:
            return self
        return dataclasses.replace(self, cgroups=cgroups, generation=self.generation + 1)

    def sources(self) -> set[RuleSource]:
        """All sources that have cgroups."""
        return {
            rule.source for policy in self.policies for rule in policy.rules if rule.source.name
        }

    def host_pods(self) -> dict[str, PodSelector]:
        """Selectors of hostNetwork pods, by `RuleSource.name`."""
        return {
            name: selector
            for policy in self.policies
            for name, selector in policy.host_pods.items()
        }

    def named_cgroups(self) -> dict[int, bool]:
        """Ids of the sources' cgroups that exist now; whether with all below it."""
        named: dict[int, bool] = {}
        for source in self.sources():
            for found in self.cgroups.get(source.name, ()):
                named[found.id] = named.get(found.id, False) or source.kind != "exact"
        return named

    def problem(self, rule: PolicyRule) -> str:
        """Why the rule admits nothing now, in one sentence; else empty."""
        source = rule.source
        if not source.name:
            return ""
        found = self.cgroups.get(source.name, ())
        if not found:
            return _MISSING[source.kind].format(source.name)
        if source.kind != "exact" and found[0].level is None:
            return (
                f"Cgroups below that of {source} cannot be matched: it is not known how "
                "deep podgate's cgroup namespace is; run podgate in that of the host."
            )
        return ""

    def admit(self, pod: Pod, own: Sequence[Rule]) -> Admission:
        """The rules in `own` (the kubelet's), then those of policies, up to the gate's maximum.

        Policies are in the order of their names, so that the same rules fit each time. Of equal
        rules the gate gets the first.
        """
        matching: dict[Rule, tuple[str, Rule]] = {}
        for policy in self.selected.of(pod):
            for rule in policy.rules:
                for packed in self.pack(rule, pod):
                    numbered = dataclasses.replace(packed, id=self.ids[policy.name, rule])
                    matching.setdefault(packed, (policy.name, numbered))
        room = abi.GATE_RULES - len(own)
        fitting = tuple(rule for _, rule in list(matching.values())[:room])
        skipped = [name for name, _ in list(matching.values())[room:]]
        return Admission(
            (*own, *fitting),
            _skipped_sentence(len(own) + len(matching), skipped) if skipped else "",
            tuple(skipped),
        )

    def pack(self, rule: PolicyRule, pod: Pod) -> Iterator[Rule]:
        """The gate's form of the rule, without an id; nothing while it admits nothing."""
        named: Iterable[int] = ()
        if rule.port_name:
            named = pod.spec.port_numbers(rule.port_name, rule.protocol_text)
        return packed(rule, self.cgroups.get(rule.source.name, ()), named)


def packed(rule: PolicyRule, cgroups: Sequence[CgroupId], named: Iterable[int]) -> Iterator[Rule]:
    """The gate's form of the rule, without an id; nothing while it admits nothing. cgroups: of its
    source; named: the pod's ports with its port's name."""
    ports = [(rule.first_port, rule.last_port)]
    if rule.port_name:
        ports = [(number, number) for number in named]
    for first, last in ports:
        for kind, cgroup, level in compared(rule.source, cgroups):
            yield Rule(kind, rule.protocol, first, last, cgroup, level)


def compared(
    source: RuleSource, cgroups: Iterable[CgroupId]
) -> Iterator[tuple[SourceKind, int, int]]:
    """What sockets are compared with: the kind, a cgroup's id, and its level."""
    match source.kind:
        case "any":
            yield SourceKind.ANY, 0, 0
        case "kernel":
            yield SourceKind.KERNEL, 0, 0
        case kind:
            for found in cgroups:
                if kind == "exact":
                    yield SourceKind.CGROUP, found.id, 0
                elif found.level is not None:
                    yield SourceKind.ANCESTOR, found.id, found.level


_MISSING = {
    "exact": "Cgroup {} not found; the rule admits nothing until it exists.",
    "subtree": "Cgroup {} not found; the rule admits nothing until it exists.",
    "unit": "Unit {} has no cgroup; the rule admits nothing until the unit runs.",
    "pods": "No hostNetwork pod of this node matches {}; the rule admits nothing until one runs.",
}


def _ids(keys: Iterable[_Key]) -> dict[_Key, int]:
    """A number for each rule, made from its content: the counts continue after a restart of the
    agent, changes of other policies, and a new cgroup at the rule's path.
    """
    ids: dict[_Key, int] = {}
    taken = {0}
    for key in keys:
        policy, rule = key
        text = "\0".join(
            (policy, rule.source.kind, rule.source.name, rule.protocol_text, rule.ports_text)
        ).encode()
        number = 0
        while number in taken:
            text = hashlib.blake2b(text, digest_size=4).digest()
            number = int.from_bytes(text, "big")
        taken.add(number)
        ids[key] = number
    return ids


def _skipped_sentence(count: int, names: list[str]) -> str:
    different = list(dict.fromkeys(names))
    return (
        f"{count} rules match this pod and a gate holds {abi.GATE_RULES}: {len(names)} are "
        f"skipped, of {listed(different)}; let fewer policies select the pod, or join their "
        "ports into ranges."
    )
