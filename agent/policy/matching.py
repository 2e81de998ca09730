"""Matches policies with pods and cgroups to compute each gate's rules. Pure functions."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

from agent.linux.cgroups import CgroupId
from agent.pods.pod import Pod
from agent.pods.pod_state import Admission
from agent.policy.api_types import Policy, PolicyRule
from bpf import abi
from bpf.rules import Rule, SourceKind

_Key = tuple[str, PolicyRule]
# Names in one sentence; more would fill a screen.
_MAX_NAMES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class RuleSet:
    """All policies in force, and the current ids of the cgroups that they name. Immutable."""

    policies: tuple[Policy, ...] = ()
    cgroups: Mapping[str, CgroupId] = dataclasses.field(default_factory=dict)
    ids: Mapping[_Key, int] = dataclasses.field(default_factory=dict)
    """Keys of the hit counters, one per rule and policy."""

    @classmethod
    def of(cls, policies: Iterable[Policy]) -> "RuleSet":
        """Without cgroup ids."""
        ordered = tuple(sorted(policies, key=lambda policy: policy.name))
        keys = ((policy.name, rule) for policy in ordered for rule in policy.rules)
        return cls(ordered, {}, _ids(keys))

    def with_cgroups(self, cgroups: Mapping[str, CgroupId]) -> "RuleSet":
        return dataclasses.replace(self, cgroups=cgroups)

    def cgroup_paths(self) -> set[str]:
        """All cgroups that policies name."""
        return {
            rule.source.path
            for policy in self.policies
            for rule in policy.rules
            if rule.source.path
        }

    def named_cgroups(self) -> dict[int, bool]:
        """Ids of the cgroups that policies name and that exist now; whether with all below it."""
        named: dict[int, bool] = {}
        for policy in self.policies:
            for rule in policy.rules:
                if found := self.cgroups.get(rule.source.path):
                    is_subtree = rule.source.kind == "subtree"
                    named[found.id] = named.get(found.id, False) or is_subtree
        return named

    def problem(self, rule: PolicyRule) -> str:
        """Why the rule admits nothing now, in one sentence; else empty."""
        path = rule.source.path
        if not path:
            return ""
        found = self.cgroups.get(path)
        if found is None:
            return f"Cgroup {path} not found; the rule admits nothing until it exists."
        if rule.source.kind == "subtree" and found.level is None:
            return (
                f"The subtree of cgroup {path} cannot be matched in podgate's own cgroup "
                "namespace; run podgate in the node's."
            )
        return ""

    def admit(self, pod: Pod, own: Sequence[Rule]) -> Admission:
        """The rules in `own` (the kubelet's), then those of policies, up to the gate's maximum.

        Policies are in the order of their names, so that the same rules fit each time. Of equal
        rules the gate gets the first.
        """
        matching: dict[Rule, tuple[str, Rule]] = {}
        for policy in self.policies:
            if not policy.pods.matches(pod):
                continue
            for rule in policy.rules:
                if packed := self._pack(rule):
                    numbered = dataclasses.replace(packed, id=self.ids[policy.name, rule])
                    matching.setdefault(packed, (policy.name, numbered))
        room = abi.GATE_RULES - len(own)
        fitting = tuple(rule for _, rule in list(matching.values())[:room])
        skipped = [name for name, _ in list(matching.values())[room:]]
        return Admission(
            (*own, *fitting),
            _skipped_sentence(len(own) + len(matching), skipped) if skipped else "",
        )

    def _pack(self, rule: PolicyRule) -> Rule | None:
        """The gate's form of the rule, without an id; None while it admits nothing."""
        packed = Rule(SourceKind.ANY, rule.protocol, rule.first_port, rule.last_port)
        match rule.source.kind:
            case "any":
                return packed
            case "kernel":
                return dataclasses.replace(packed, source=SourceKind.KERNEL)
        found = self.cgroups.get(rule.source.path)
        if found is None:
            return None
        if rule.source.kind == "exact":
            return dataclasses.replace(packed, source=SourceKind.CGROUP, cgroup=found.id)
        if found.level is None:
            return None
        return dataclasses.replace(
            packed, source=SourceKind.ANCESTOR, cgroup=found.id, level=found.level
        )


def _ids(keys: Iterable[_Key]) -> dict[_Key, int]:
    """A number for each rule, made from its content: the counts continue after a restart of the
    agent, changes of other policies, and a new cgroup at the rule's path.
    """
    ids: dict[_Key, int] = {}
    taken = {0}
    for key in keys:
        policy, rule = key
        text = "\0".join(
            (policy, rule.source.kind, rule.source.path, rule.protocol_text, rule.ports_text)
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
    policies = ", ".join(different[:_MAX_NAMES])
    if len(different) > _MAX_NAMES:
        policies += f" and {len(different) - _MAX_NAMES} more"
    return (
        f"{count} rules match this pod and a gate holds {abi.GATE_RULES}: {len(names)} are "
        f"skipped, of {policies}; let fewer policies select the pod, or join their "
        "ports into ranges."
    )
