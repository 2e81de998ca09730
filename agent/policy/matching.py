"""Which rules of which policies a pod's gate gets: policies against pods and cgroups, no I/O."""

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
_MOST_NAMES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class RuleSet:
    """All policies in force, and the cgroups that they name as they are now. Never changed."""

    policies: tuple[Policy, ...] = ()
    cgroups: Mapping[str, CgroupId] = dataclasses.field(default_factory=dict)
    ids: Mapping[_Key, int] = dataclasses.field(default_factory=dict)
    """Keys of the hit counters, one for each rule of each policy."""

    @classmethod
    def of(cls, policies: Iterable[Policy]) -> "RuleSet":
        """Without any cgroup yet."""
        ordered = tuple(sorted(policies, key=lambda policy: policy.name))
        return cls(ordered, {}, _ids((one.name, rule) for one in ordered for rule in one.rules))

    def with_cgroups(self, cgroups: Mapping[str, CgroupId]) -> "RuleSet":
        return dataclasses.replace(self, cgroups=cgroups)

    def cgroup_paths(self) -> set[str]:
        """All cgroups that are named."""
        return {
            rule.sender.path
            for policy in self.policies
            for rule in policy.rules
            if rule.sender.path
        }

    def problem(self, rule: PolicyRule) -> str:
        """Why the rule lets nobody in now, in one sentence, or nothing."""
        path = rule.sender.path
        if not path:
            return ""
        found = self.cgroups.get(path)
        if found is None:
            return f"Cgroup {path} is not there; the rule lets nobody in until it is."
        if rule.sender.kind == "subtree" and found.level is None:
            return (
                f"Podgate cannot tell what is below cgroup {path} from a cgroup namespace of its "
                "own; run it in the node's."
            )
        return ""

    def admit(self, pod: Pod, own: Sequence[Rule]) -> Admission:
        """`own` (the kubelet's) and then what the policies say, as far as the gate has room.

        The order is that of policies' names, so that the same rules find room each time. Of equal
        rules the gate needs one, which is the first one's.
        """
        wanted: dict[Rule, tuple[str, Rule]] = {}
        for policy in self.policies:
            if not policy.pods.matches(pod):
                continue
            for rule in policy.rules:
                if packed := self._pack(rule):
                    numbered = dataclasses.replace(packed, id=self.ids[policy.name, rule])
                    wanted.setdefault(packed, (policy.name, numbered))
        room = abi.GATE_RULES - len(own)
        fitting = tuple(rule for _, rule in list(wanted.values())[:room])
        left_out = [name for name, _ in list(wanted.values())[room:]]
        return Admission(
            (*own, *fitting),
            _skipped_sentence(len(own) + len(wanted), left_out) if left_out else "",
        )

    def _pack(self, rule: PolicyRule) -> Rule | None:
        """The gate's form of it, without an id; None while it lets nobody in."""
        made = Rule(SourceKind.ANY, rule.protocol, rule.first_port, rule.last_port)
        match rule.sender.kind:
            case "any":
                return made
            case "kernel":
                return dataclasses.replace(made, source=SourceKind.KERNEL)
        found = self.cgroups.get(rule.sender.path)
        if found is None:
            return None
        if rule.sender.kind == "exact":
            return dataclasses.replace(made, source=SourceKind.CGROUP, cgroup=found.id)
        if found.level is None:
            return None
        return dataclasses.replace(
            made, source=SourceKind.ANCESTOR, cgroup=found.id, level=found.level
        )


def _ids(keys: Iterable[_Key]) -> dict[_Key, int]:
    """A number for each, made from what the rule says: the counts go on when the agent is another,
    when policies around it change and when its cgroup is made anew.
    """
    ids: dict[_Key, int] = {}
    taken = {0}
    for key in keys:
        policy, rule = key
        text = "\0".join(
            (policy, rule.sender.kind, rule.sender.path, rule.protocol_text, rule.ports_text)
        ).encode()
        number = 0
        while number in taken:
            text = hashlib.blake2b(text, digest_size=4).digest()
            number = int.from_bytes(text, "big")
        taken.add(number)
        ids[key] = number
    return ids


def _skipped_sentence(wanted: int, names: list[str]) -> str:
    different = list(dict.fromkeys(names))
    named = ", ".join(different[:_MOST_NAMES])
    if len(different) > _MOST_NAMES:
        named += f" and {len(different) - _MOST_NAMES} more"
    return (
        f"{wanted} rules are for this pod and a gate holds {abi.GATE_RULES}: {len(names)} are left "
        f"out, of {named}; let fewer policies select the pod, or join their ports into ranges."
    )
