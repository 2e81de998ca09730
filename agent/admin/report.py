"""What `podgate status` shows: the report that the admin socket serves."""

import datetime

import msgspec

from agent.pods.conditions import Condition


class ProbeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One probe of one container."""

    container: str
    type: str
    handler: str
    result: str
    """What thresholds made of the outcomes: success, failure or unknown."""
    last_message: str
    families: list[str]
    """Which of IPv4 and IPv6 gave the last outcome; none where nobody was reached."""
    successes: int
    failures: int


class CarriedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a relay carried for one port of a pod, that is for the kubelet's probes and hooks.

    container, handler: several are joined by a plus; port: 0 for those that nobody declares;
    outcomes: how many connections ended in which way; open_ms: mean time until the pod answered,
    in milliseconds, None where it never did.
    """

    container: str
    handler: str
    port: int
    last_outcome: str
    outcomes: dict[str, int]
    open_ms: float | None


class GateStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One gated interface. `packets`: node-sent ones, by verdict and reason."""

    interface: str
    ifindex: int
    packets: dict[str, dict[str, int]]


class PathStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One address of an enforced pod, and what the self-test found: `confirmed`, `bypassed` (the
    node reaches it past the gate), `unreachable` (nothing that the node sends there arrives) or
    `failed` (the log says why)."""

    address: str
    result: str


class PodStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pod, as podgate knows it now."""

    namespace: str
    name: str
    uid: str
    mode: str
    source: str
    netns: str | None
    addresses: list[str]
    """Its own."""
    unconfirmed: dict[str, str] = {}
    """Addresses that its namespace shows and that nothing confirms, with the reason."""
    conditions: list[Condition]
    gates: list[GateStatus]
    paths: list[PathStatus]
    older_flows: int
    """That the node began before the gate enforced, and that go on."""
    probes: list[ProbeStatus]
    carried: list[CarriedStatus] = []


class HookStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One hook at the root cgroup; `problem`: why it is not in force, or None."""

    name: str
    problem: str | None


class RelayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The relay of strict mode. problem: why none serves, where one is wanted; restarts: of this
    agent's; open, held: connections now; is_direct: whether there is no room for more; unknown:
    connections to addresses that stand for no pod; gates: on its interfaces."""

    is_up: bool
    problem: str
    restarts: int
    open: int
    held: int
    is_direct: bool
    unknown: int
    gates: list[GateStatus]


class FeedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where pods come from, and what is wrong there. pods_from: in words; problems: one sentence
    each; unsaid: how many pods' conditions the API server has still to be told."""

    pods_from: str
    problems: list[str] = []
    unsaid: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole agent. `load_ms`: milliseconds from start to loaded programs; `kubelet`: the path
    of its cgroup, or None for the reason in `kubelet_problem`."""

    version: str
    pid: int
    started: datetime.datetime
    source_hash: str
    attachment: str
    was_compiled: bool
    load_ms: float
    is_synced: bool
    kubelet: str | None
    kubelet_problem: str
    http_address: str
    hooks: list[HookStatus]
    feed: FeedStatus
    node_refusals: dict[str, int]
    """By reason: what hooks and the tunnels' guard refused before an interface was chosen."""
    relay: RelayStatus
    pods: list[PodStatus]


class CallerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One sender of the node that would need a rule, for `podgate drops`.

    labels: of the pod; port: the pod's, 0 for protocols without; sender: path of its cgroup;
    process: its name at first sight, where the kernel says; packets: since first.
    """

    namespace: str
    pod: str
    mode: str
    protocol: str
    port: int
    sender: str
    process: str
    packets: int
    first: datetime.datetime
    last: datetime.datetime
    labels: dict[str, str] = {}


class Drops(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, the busiest first. `lost_packets`: of senders that found no place."""

    callers: list[CallerStatus]
    lost_packets: int


class RuleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of one policy. hits: opening packets; problem: why it lets nobody in, or nothing."""

    sender: str
    protocol: str
    ports: str
    hits: int
    problem: str


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in force. pods: those of this node that it is for, "namespace/name"."""

    name: str
    source: str
    pods: list[str]
    rules: list[RuleStatus]


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What `podgate rules` shows. sources: where policies come from, for people; problems: of
    policies, and of pods whose gates have no more room."""

    sources: list[str]
    policies: list[PolicyStatus]
    problems: list[str]


class RefusalStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One refusal, for `podgate drops --follow`. What is not known is empty or 0.

    namespace, pod: empty when it was refused before an interface was chosen; sender: path of the
    cgroup; process: id, where the kernel says; ports: 0 for protocols without.
    """

    at: datetime.datetime
    namespace: str
    pod: str
    verdict: str
    reason: str
    protocol: str
    source: str
    source_port: int
    destination: str
    destination_port: int
    sender: str
    process: int
    process_name: str


class Refusals(msgspec.Struct, frozen=True, kw_only=True):
    """The newest ones, the oldest of them first. newest: the number of the last, for asking on;
    lost: how many were counted only, since the kernel limits what it tells one by one.
    """

    refusals: list[RefusalStatus]
    newest: int
    lost: int
