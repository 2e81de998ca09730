"""What gates admit: the twin of src/rules.h, by the same names. Pure functions.

Nothing else in Python evaluates rules. tests/kernel/test_explain_program.py runs the gate's own
program on the same facts and compares each verdict.
"""

import dataclasses
from collections.abc import Iterable

from bpf import abi
from bpf.rules import Rule, SourceKind

ROOT_CGROUP = 1
"""Id of the hierarchy's root, the ancestor of level 0 of every cgroup."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroup of a socket. path: for people, gates do not compare it; ancestors: ids from the
    root down to the cgroup itself."""

    id: int
    path: str
    ancestors: tuple[int, ...]

    def ancestor(self, level: int) -> int:
        """As bpf_skb_ancestor_cgroup_id: 0 below the cgroup itself."""
        return self.ancestors[level] if level < len(self.ancestors) else 0


@dataclasses.dataclass(frozen=True, slots=True)
class NewFlow:
    """`struct new_flow`: what rules are compared with.

    protocol: IP protocol number; port: the pod's, 0 for protocols without ports; cgroup: of the
    source's socket, None without one; is_kubelet: whether rules for the kubelet match; is_kernel:
    whether those for the kernel do, which a hook never runs for.
    """

    protocol: int
    port: int
    cgroup: Cgroup | None = None
    is_kubelet: bool = False
    is_kernel: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFacts:
    """The node's configuration. Cgroups are ids, 0 for unknown; times are CLOCK_MONOTONIC in
    nanoseconds, 0 for none."""

    kubelet_cgroup: int = 0
    """By the agent's search."""
    remade_cgroup: int = 0
    """`remade_cgroup`: the newest at the path of the followed unit, as the kernel recorded it."""
    is_unit_followed: bool = False
    pods_cgroup: int = 0
    pods_level: int = 0
    heartbeat_ns: int = 0
    stale_after_ns: int = 0
    dead_man_ns: int = 0
    has_ovs: bool = False
    tunnel_ports: frozenset[int] = frozenset()

    @classmethod
    def of(cls, config: abi.CConfig, remade: abi.CKubeletRemade) -> "NodeFacts":
        is_followed = config.kubelet_unit != 0
        return cls(
            kubelet_cgroup=config.kubelet_cgroup,
            remade_cgroup=remade.cgroup
            if is_followed and remade.unit == config.kubelet_unit
            else 0,
            is_unit_followed=is_followed,
            pods_cgroup=config.pods_cgroup,
            pods_level=config.pods_cgroup_level,
            heartbeat_ns=config.heartbeat_ns,
            stale_after_ns=config.stale_after_ns,
            dead_man_ns=config.dead_man_ns,
            has_ovs=bool(config.has_ovs),
            tunnel_ports=frozenset(config.tunnel_ports[: config.tunnel_port_count]),
        )

    @property
    def kubelet_cgroups(self) -> frozenset[int]:
        """Those that count as the kubelet's; none while it is not identified."""
        return frozenset({self.kubelet_cgroup, self.remade_cgroup} - {0})

    def heartbeat_age_ns(self, now_ns: int) -> int | None:
        """None if there never was a heartbeat; 0 if it is of a clock slightly ahead."""
        return max(0, now_ns - self.heartbeat_ns) if self.heartbeat_ns else None

    def is_stale(self, now_ns: int) -> bool:
        """No heartbeat for so long that the kubelet may have another cgroup."""
        age_ns = self.heartbeat_age_ns(now_ns)
        return age_ns is not None and 0 < self.stale_after_ns <= age_ns

    def is_dead_man_expired(self, now_ns: int) -> bool:
        """No heartbeat for so long that all gates are open."""
        age_ns = self.heartbeat_age_ns(now_ns)
        return age_ns is not None and 0 < self.dead_man_ns < age_ns

    def is_kubelet_cgroup(self, cgroup: Cgroup | None) -> bool:
        return cgroup is not None and cgroup.id in self.kubelet_cgroups

    def is_in_pod(self, cgroup: Cgroup) -> bool:
        """Whether the cgroup is below that of all pods; False if that is unknown."""
        return bool(self.pods_cgroup) and cgroup.ancestor(self.pods_level) == self.pods_cgroup

    def is_kubelet_unsure(self, now_ns: int) -> bool:
        """Whether every process outside pods may be the kubelet."""
        if self.kubelet_cgroups:
            return not self.is_unit_followed and self.is_stale(now_ns)
        return True

    def may_be_kubelet(self, cgroup: Cgroup | None, now_ns: int) -> bool:
        """The kubelet, or any process outside pods while it is not identified."""
        if cgroup is None:
            return False
        is_unsure = self.is_kubelet_unsure(now_ns) and not self.is_in_pod(cgroup)
        return is_unsure or self.is_kubelet_cgroup(cgroup)


def is_source(rule: Rule, flow: NewFlow) -> bool:
    """Whether the rule admits the flow's source, to whatever port."""
    cgroup = flow.cgroup
    match rule.source:
        case SourceKind.ANY:
            return True
        case SourceKind.KUBELET:
            return flow.is_kubelet
        case SourceKind.CGROUP:
            return cgroup is not None and cgroup.id == rule.cgroup
        case SourceKind.ANCESTOR:
            return cgroup is not None and cgroup.ancestor(rule.level) == rule.cgroup
    return flow.is_kernel


def is_protocol(rule: Rule, flow: NewFlow) -> bool:
    return rule.protocol in (0, flow.protocol)


def is_destination(rule: Rule, flow: NewFlow) -> bool:
    """Whether the rule admits to the flow's protocol and port, whatever source."""
    return is_protocol(rule, flow) and rule.first_port <= flow.port <= rule.last_port


def find_rule(rules: Iterable[Rule], flow: NewFlow) -> Rule | None:
    """The first rule that matches."""
    return next(
        (rule for rule in rules if is_source(rule, flow) and is_destination(rule, flow)), None
    )
