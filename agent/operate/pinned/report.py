"""What the kernel knows without the agent, for `podgate status`."""

import datetime

import msgspec

from agent.admin.finding import Finding
from agent.admin.report import GateStatus, HookStatus


class PinnedGateStatus(GateStatus, frozen=True, kw_only=True, rename="camel"):
    """One gate. namespace, pod: as the agent saved them, empty if it has not; mode: as in the
    labels; addresses: the pod's; attachment: tcx, clsact, or empty if no program is attached;
    declared_ports: whether the kubelet is admitted to any port; rules: other rules.
    """

    namespace: str
    pod: str
    mode: str
    addresses: list[str]
    attachment: str
    declared_ports: bool
    rules: int
    is_in_grace_period: bool


class Exposure(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What opens, or is open, while no agent runs.

    what: `declared-ports` or `all`; pods: how many; at: when it opens unless an agent starts, or
    has opened, None if that is not known; text: one sentence.
    """

    what: str
    pods: int
    is_open: bool
    at: datetime.datetime | None
    text: str


class PinnedRelayStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The relay of strict mode. is_up: whether its heartbeat is fresh; ports: to which it proxies;
    beat_age_seconds: None if there never was one."""

    is_up: bool
    beat_age_seconds: float | None
    ports: int
    has_fallback: bool = True
    """Whether gates of pods in strict admit the kubelet while no relay serves."""


class PinnedStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The whole node. agent: why the agent did not answer; agent_pid: of the process that holds the
    node, 0 if none does; agent_age_seconds: since it started; heartbeat_age_seconds: None if there
    never was one; kubelet: path of the cgroup that gates admit, None if it is not identified;
    is_kubelet_followed: whether the kernel follows its restarts.
    """

    agent: str
    agent_pid: int = 0
    agent_age_seconds: float = 0.0
    is_off: bool = False
    """Whether `podgate off --node` is in force."""
    schema: int
    heartbeat_age_seconds: float | None
    stale_after_seconds: float
    """0: never"""
    dead_man_seconds: float
    """0: never"""
    exposures: list[Exposure]
    kubelet: str | None
    is_kubelet_followed: bool
    hooks: list[HookStatus]
    relay: PinnedRelayStatus
    node_drops: dict[str, int]
    """By reason: dropped or rejected on the host before an interface is chosen."""
    gates: list[PinnedGateStatus]
    findings: list[Finding] = []
    """What of all this is wrong, the worst first: `agent.operate.pinned.findings.find`."""
