"""Reports of the admin API: status, drops, rules and drop events."""

import datetime
from typing import Final

import msgspec

from agent.admin.finding import Finding
from agent.listing import full_name
from agent.pods.conditions import Condition
from agent.pods.pod import Problem


class AnswerStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the kubelet's own probe gets, where podgate is to answer it.

    verdict: `healthy` or `unhealthy`, empty if it is not answered now; age_seconds: since the
    check; obstacle: why it is not answered, in one word, and problem: in one sentence.
    """

    verdict: str = ""
    age_seconds: float | None = None
    obstacle: str = ""
    problem: str = ""


class ProbeStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One probe of one container."""

    container: str
    type: str
    handler: str
    result: str
    """After thresholds: success, failure or unknown."""
    last_message: str
    families: list[str]
    """The families of the last outcome, IPv4 or IPv6; empty if no address responded."""
    successes: int
    failures: int
    recent_ms: list[float | None] = []
    """Durations of the newest probes in milliseconds, oldest first; None for one that failed."""
    answer: AnswerStatus | None = None
    """None unless the pod requests that it is answered."""
    is_redirected: bool = False
    """Whether another process of the pod accepts its connections, so that it has no result."""
    lacks_certificate: bool = False
    """Whether its client certificate is missing, unusable or rejected: it has no result either."""
    is_looked_up: bool = False
    """Whether a lookup of the listener decided the last attempt, without a connection."""
    lookups_differ: bool = False
    """Whether connections failed although lookups found a listener with room."""


class RelayedPortStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The kubelet's connections that a relay proxied to one port of a pod, for probes and hooks.

    container, handler: several are joined by a plus; port: 0 for undeclared ones; outcomes:
    connections by outcome; open_ms: mean time until the pod responded, in milliseconds, None if it
    never did.
    """

    container: str
    handler: str
    port: int
    last_outcome: str
    outcomes: dict[str, int]
    open_ms: float | None


class GateStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One gated interface. `packets`: those that the host sent, by verdict and reason."""

    interface: str
    ifindex: int
    packets: dict[str, dict[str, int]]


class PathStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One address of an enforced pod, with the result of its path test.

    `confirmed`, `bypassed` (the host reaches it without passing the gate), `unreachable` (packets
    from the host do not arrive) or `failed` (the log has the reason).
    """

    address: str
    result: str


class PodProblem(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the agent reports of one pod beside its conditions. part: of which part of it, a key of
    `agent.admin.findings.POD_PARTS`; text: in one sentence."""

    part: str
    text: str


class PodStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One pod in its current state."""

    namespace: str
    name: str
    uid: str
    mode: str
    mode_problems: list[Problem] = []
    """Labels that are no mode, not allowed, or limited by the node's ceiling."""
    mode_origin: str = ""
    """What raised the mode above that of labels and default, in words, or empty."""
    ingress_policies: list[str] = []
    """What ClusterNetworkPolicies that select it mean for node traffic, in sentences: all of them
    together first, then each. Empty if none does."""
    problems: list[PodProblem] = []
    source: str
    netns: str | None
    addresses: list[str]
    """Confirmed ones."""
    unconfirmed: dict[str, str] = {}
    """Addresses that its network namespace has and no other source confirms, with the reason."""
    conditions: list[Condition]
    gates: list[GateStatus]
    paths: list[PathStatus]
    existing_flows: int
    """Open flows that the host opened before the gate enforced."""
    probes: list[ProbeStatus]
    strict_problem: str = ""
    """Why it stays at enforce, or would, in mode strict; one sentence, or empty."""
    relayed: list[RelayedPortStatus] = []

    @property
    def full_name(self) -> str:
        """ "namespace/name"; the name alone for an invalid manifest."""
        return full_name(self.namespace, self.name)


class HookStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One hook at the root cgroup; `problem`: why it does not work, or None."""

    name: str
    problem: str | None


class RelayStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The relay of strict mode.

    problem: why no relay serves, where one is needed; restarts: by this agent; connections: proxied
    now; held_syns: held now; is_bypassed: whether it is full, so that new connections go directly
    to the gate; unknown_address: connections to addresses without a pod; gates: on its interfaces;
    has_fallback: whether gates admit the kubelet while no relay serves.
    """

    is_up: bool
    problem: str
    restarts: int
    connections: int
    held_syns: int
    is_bypassed: bool
    unknown_address: int
    gates: list[GateStatus]
    has_fallback: bool = True


class RawSocketSourceStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Raw or packet sockets of the host's namespace that one container without a policy created, or
    tried to. cgroup: its path; process: name of the first one's process; sockets: since `first`.
    """

    cgroup: str
    process: str
    family: str
    verdict: str
    sockets: int
    first: datetime.datetime
    last: datetime.datetime


class RawSocketStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """mode: of --raw-sockets; problem: what is not rejected though it should be, in one sentence,
    or empty; sources: the busiest first; rejected: sockets since the maps were made."""

    mode: str
    problem: str
    sources: list[RawSocketSourceStatus]
    rejected: int = 0


class HostProbeStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """mode: of --kubelet-host-probes; problem: why nothing is rejected though it should be, in one
    sentence, or empty; rejected: connections, to addresses that probes and hooks name now."""

    mode: str = ""
    problem: str = ""
    rejected: int = 0


class ConditionOwnerStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An owner of conditions (a ConditionOwner). gone_since: since when it has no stream open;
    conditions: of pods, that it has reported, and how many of them are stale; waiting_pods: those
    with a readiness gate of its domain that is not True, as "namespace/name"."""

    domain: str
    is_present: bool
    gone_since: datetime.datetime | None = None
    stale_after_seconds: int
    when_stale: str
    conditions: int
    stale: int
    waiting_pods: list[str] = []


class SourceProblem(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What does not respond. part: a key of `agent.admin.findings.SOURCE_PARTS`; text: what it is
    and why, one sentence."""

    part: str
    text: str


class PodSourceStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The source of pods. pods_from: in words; pending_conditions: pods whose conditions in the API
    server are not up to date; pending_seconds: since when the oldest of them is not."""

    pods_from: str
    problems: list[SourceProblem] = []
    pending_conditions: int = 0
    pending_seconds: float = 0.0


class AgentReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The whole agent. `programs`: where they came from, a value of `bpf.pinning.Origin`;
    `load_ms`: milliseconds to load them; `kubelet`: the path of its cgroup, or None for the reason
    in `kubelet_problem`; `kubelet_unfollowed`: why the kernel does not follow its restarts without
    the agent, or empty; `open_ports`: why declared ports are open to host processes, or empty;
    `unsynced`: why not all pods of the node have been read, or empty."""

    version: str
    pid: int
    started: datetime.datetime
    source_hash: str
    attachment: str
    programs: str
    load_ms: float
    is_synced: bool
    unsynced: str = ""
    kubelet: str | None
    kubelet_problem: str
    kubelet_unfollowed: str = ""
    open_ports: str = ""
    http_address: str
    """Empty while its port is not open."""
    server_problems: list[str] = []
    """Why ports are not open, one sentence each."""
    default_mode: str = ""
    """Mode of pods for which no label decides."""
    max_mode: str = ""
    """The ceiling of all modes."""
    max_mode_from: str = ""
    """What sets the ceiling, in words."""
    in_force: list[str] = []
    """What podgate has attached or installed on the node, by kind: empty once it is off.
    A relay that only drains its connections is left out."""
    label_problems: list[Problem] = []
    """Labels of the node and of namespaces that are no mode."""
    policy_problems: list[str] = []
    network_policy_problems: list[str] = []
    """ClusterNetworkPolicies that are not understood, one sentence each."""
    """Policies and sources of policies that are not applied as written, one sentence each."""
    components: dict[str, bool] = {}
    """Whether each component that the node needs works, as `podgate_component_up`."""
    component_problems: list[str] = []
    """Parts of the agent that failed within the last minute, one sentence each."""
    hooks: list[HookStatus]
    pod_source: PodSourceStatus
    node_drops: dict[str, int]
    """By reason: dropped or rejected on the host before an interface is chosen."""
    raw_sockets: RawSocketStatus
    host_probes: HostProbeStatus = HostProbeStatus()
    egress_problems: list[str] = []
    """Of HostEgressPolicies, one sentence each."""
    flow_problems: list[str] = []
    """Why records of flows are not written, one sentence each."""
    pods_cgroup_problem: str = ""
    """Why processes of pods cannot be distinguished from the host's, one sentence."""
    condition_owners: list[ConditionOwnerStatus] = []
    """Owners of conditions of other domains, by domain."""
    condition_owner_problems: list[str] = []
    """ConditionOwners that are not applied as written, one sentence each."""
    policies_without_effect: list[str] = []
    """Policies of files of this node that select no pod or find no source, one sentence each."""
    relay: RelayStatus
    pods: list[PodStatus]
    findings: list[Finding] = []
    """What of all this is wrong, the worst first: `agent.admin.findings.find`."""
    namespace: str = ""
    """Whose pods alone it has; empty: those of all namespaces."""


class SourceProcessStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One source process whose traffic was dropped, or in audit would have been, in one mode of the
    pod's gate.

    mode, verdict: of that time; `would-drop` has passed; labels: of the pod; port: the pod's, 0 for
    protocols without, and if it stands for several (has_many_ports); cgroup: its path; process: its
    name when first seen, if the kernel reports it; packets: since `first`.
    """

    namespace: str
    pod: str
    mode: str
    protocol: str
    port: int
    cgroup: str
    process: str
    packets: int
    first: datetime.datetime
    last: datetime.datetime
    labels: dict[str, str] = {}
    has_many_ports: bool = False
    source_pod: str = ""
    """The pod of that cgroup, "namespace/name"; empty for other processes."""
    verdict: str = ""
    is_admitted: bool = False
    """Whether a rule admits the source by now."""
    port_count: int = 0
    """Of a scan; 0 if the kernel has not counted all of its ports one by one. lowest_port and
    highest_port: of those that it has."""
    lowest_port: int = 0
    highest_port: int = 0
    cgroup_id: int = 0
    ifindex: int = 0
    """The pod's interface on the node."""


class Drops(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All source processes, the busiest first. `lost_packets`: of sources that the full table does
    not have."""

    sources: list[SourceProcessStatus]
    lost_packets: int
    raw_sockets: list[RawSocketSourceStatus] = []
    namespace: str = ""
    """Whose pods alone it has; empty: those of all namespaces."""


AUDIT: Final = "Audit"
"""The action of a policy that only counts."""


class RuleStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One rule of one policy. hits: new flows, of a policy with action Audit observed packets that
    it would admit; problem: why it admits no source, or empty."""

    source: str
    protocol: str
    ports: str
    hits: int
    problem: str


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One policy in force. pods: those of this node that it selects, "namespace/name"; generation:
    of the API's object, 0 for others; skipped: rules that a gate had no room for, by pod."""

    name: str
    source: str
    pods: list[str]
    rules: list[RuleStatus]
    generation: int = 0
    skipped: dict[str, int] = {}
    expires: str = ""
    """When it stops admitting anything (RFC 3339); empty: never."""
    action: str = "Allow"
    """`AUDIT`: it admits nothing."""


class EgressSourceStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A subject's attempts. cgroup: its path; process: of the first attempt, empty if only its
    packets were seen; protocol: in words; attempts: connects, datagrams and packets."""

    cgroup: str
    process: str
    protocol: str
    verdict: str
    attempts: int
    first: datetime.datetime
    last: datetime.datetime


class EgressPolicyStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A HostEgressPolicy of this node. subjects, excepted, denied: in words; would_drop, drop:
    attempts, in audit and in force; problems: one sentence each; generation: of the API's object,
    0 for others."""

    name: str
    source: str
    action: str
    subjects: list[str]
    excepted: list[str]
    denied: list[str]
    would_drop: int
    drop: int
    sources: list[EgressSourceStatus]
    problems: list[str]
    generation: int = 0


class ClusterNetworkPolicyStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One ClusterNetworkPolicy that is understood. meaning: for node traffic, a sentence without
    its subject; pods: those of this node that it selects and has rules of ingress for; denied:
    those of them of which it denies all ingress."""

    name: str
    tier: str
    priority: int
    meaning: str
    pods: list[str]
    denied: list[str]


class RulesReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All policies in force. sources: where policies come from, in words; problems: of policies,
    and of pods whose gates are full."""

    sources: list[str]
    policies: list[PolicyStatus]
    problems: list[str]
    namespace: str = ""
    """Whose pods alone it has; empty: those of all namespaces."""
    egress: list[EgressPolicyStatus] = []
    cluster_network_policies: list[ClusterNetworkPolicyStatus] = []
    """In the order of evaluation; empty as well where they are not read."""


class DropEventStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One drop event, for `podgate drops --follow`. Unknown fields are empty or 0.

    namespace, pod: empty if it was dropped before an interface was chosen; cgroup: its path;
    process: id, if the kernel reports it; ports: 0 for protocols without.
    """

    at: datetime.datetime
    namespace: str
    pod: str
    verdict: str
    reason: str
    protocol: str
    source_address: str
    source_port: int
    destination_address: str
    destination_port: int
    cgroup: str
    process: int
    process_name: str
    source_pod: str = ""
    """The pod of that cgroup, "namespace/name"."""


class SuppressedEvents(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Drop events that the kernel did not send since the last such document: it limits their rate.
    They may be of any pod; the drops themselves are counted."""

    at: datetime.datetime
    suppressed: int


class DropEvents(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The newest drop events, the oldest of them first. newest: the number of the last, to continue
    from; lost: suppressed by the kernel's limit, which are only counted.
    """

    events: list[DropEventStatus]
    newest: int
    lost: int
