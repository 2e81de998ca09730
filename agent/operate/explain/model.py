"""The answers of `podgate explain`. Their JSON is stable: fields are added, never renamed."""

import msgspec

PASS, DROP, WOULD_DROP = "pass", "drop", "would-drop"

FORWARDED = "not-judged"
"""Not a host packet: it is left to NetworkPolicy."""
NO_GATE = "no-gate"
"""Nothing of podgate is on the way."""
HOST_EGRESS = "host-egress"
CONNECT_HOOK = "connect-hook"
RELAY = "relay"
DEFAULT_DENY = "default-deny"
GATE = "gate"

DECIDERS = {
    FORWARDED: "not judged: not a host packet",
    NO_GATE: "no gate",
    HOST_EGRESS: "HostEgressPolicy",
    CONNECT_HOOK: "cgroup hook at connect",
    RELAY: "relay",
    DEFAULT_DENY: "nftables default-deny table",
    GATE: "gate",
}


SAME = "same"


class Step(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One step of the evaluation. source: the file and function of podgate that it stands for."""

    name: str
    answer: str
    source: str
    is_deciding: bool = False


class RuleAnswer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One rule of the gate. mismatch: why it does not match, or empty; policy: the
    HostAccessPolicy that it is from, empty for the kubelet's rules and if it is not known."""

    source: str
    protocol: str
    ports: str
    policy: str = ""
    mismatch: str = ""


class EgressAnswer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One destination that a HostEgressPolicy denies. action: `Audit` or `Enforce`; destination:
    in words; mismatch: why it does not match, or empty."""

    policy: str
    action: str
    destination: str
    mismatch: str = ""


class NearMiss(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A HostAccessPolicy that almost admits the flow. mismatch: `port`, `source`, `pod` or `node`,
    or `nothing` if the gate lacks its rule; text: what it admits, and why not this flow, without
    its subject, which is the policy."""

    policy: str
    mismatch: str
    text: str


class SourceFacts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The source. origin: `host`, `kernel`, `pod` or `outside`; text: in words."""

    origin: str
    text: str
    cgroup: str = ""
    cgroup_id: int = 0
    is_kubelet: bool = False


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The pod's address, and the gate that evaluates packets to it. mode, interface: the gate's,
    empty without one."""

    address: str
    port: int
    protocol: str
    namespace: str = ""
    pod: str = ""
    interface: str = ""
    mode: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What would change the verdict. command: to be run as it is, or empty; policy: a
    HostAccessPolicy as YAML, or empty."""

    text: str
    command: str = ""
    policy: str = ""


class AgentFacts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The agent. state: `alive`, or `dead` if it does not respond; heartbeat_age_seconds: None
    before its first heartbeat; consequence: what follows for the gates, in one sentence."""

    state: str
    heartbeat_age_seconds: float | None
    consequence: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The verdict on a new flow, or on a reply, and how it comes about.

    verdict: `pass`, `drop` or `would-drop`; decided_by: a key of `DECIDERS`; reason: a name of
    docs/reference/reasons.md, or empty; rule: that admits it; confirmation: `same` if the
    gate's program, run on the same facts, has this verdict and reason; otherwise what it has, or
    why it was not run; empty for what it cannot decide; egress_rule: that denies it, or in audit
    would; egress_rules: those of all HostEgressPolicies, empty if they are about no such source.
    """

    verdict: str
    decided_by: str
    reason: str
    text: str
    source: SourceFacts
    target: TargetFacts
    agent: AgentFacts
    steps: list[Step]
    rule: RuleAnswer | None = None
    rules: list[RuleAnswer] = []
    near_misses: list[NearMiss] = []
    changes: list[Change] = []
    notes: list[str] = []
    confirmation: str = ""
    egress_rule: EgressAnswer | None = None
    egress_rules: list[EgressAnswer] = []


class Check(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One check of a pod. state: `ok`, `problem`, or `unknown` if it could not be read;
    severity: of the finding that it is, or empty; remedy: what to do, one sentence; next: what to
    run, or empty."""

    name: str
    state: str
    text: str
    next: str = ""
    severity: str = ""
    remedy: str = ""


class PodExplanation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The checks of one pod, in order: each depends on those before it. from_agent: whether the
    agent reported it, or it was read from the pins and the saved state."""

    namespace: str
    name: str
    uid: str
    is_well: bool
    from_agent: bool
    checks: list[Check]
