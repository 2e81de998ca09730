"""What a node has seen in audit and enforce: which host processes opened flows to which pods."""

import datetime
from typing import Any

import msgspec

from agent.admin.report import PolicyStatus


class ObservedPod(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A pod as it was when it was last seen; it may be gone.

    named_ports: name, protocol (as in its spec) and number.
    """

    namespace: str
    name: str
    labels: dict[str, str] = {}
    namespace_labels: dict[str, str] = {}
    host_network: bool = False
    named_ports: tuple[tuple[str, str, int], ...] = ()


class ObservedFlows(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Flows of one source to one port of pods with the same labels, without a rule that admits
    them.

    pod: the last of these pods; protocol: IP protocol number; port: 0 for protocols without, and
    for many ports; cgroup: path of the source's, or a text in parentheses without one; source_pod:
    the pod of that cgroup; process: name of the first packet's process, if the kernel reports it;
    packets: dropped, or in audit those that would be; nodes: where it was seen.
    """

    pod: ObservedPod
    protocol: int
    port: int
    cgroup: str
    packets: int
    first: datetime.datetime
    last: datetime.datetime
    process: str = ""
    has_many_ports: bool = False
    source_pod: ObservedPod | None = None
    nodes: tuple[str, ...] = ()


class Observations(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All that one node has seen, and the policies that are in force there.

    node: its name, empty without a cluster; since, until: the time that is covered;
    unobserved_seconds: of that time without an agent, in which new pods had no gate; kubelet: path
    of its cgroup; policies: HostAccessPolicies; rules: their hits; lost: sources and packets that
    had no room.
    """

    since: datetime.datetime
    until: datetime.datetime
    flows: list[ObservedFlows]
    node: str = ""
    node_labels: dict[str, str] = {}
    unobserved_seconds: float = 0.0
    kubelet: str | None = None
    policies: list[dict[str, Any]] = []
    rules: list[PolicyStatus] = []
    lost: int = 0

    @property
    def observed_seconds(self) -> float:
        """The time that was covered by an agent."""
        return max(0.0, (self.until - self.since).total_seconds() - self.unobserved_seconds)
