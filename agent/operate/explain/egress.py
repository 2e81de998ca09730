"""What HostEgressPolicies decide about a flow of a host process. Pure functions."""

import dataclasses

from agent.operate.explain.facts import EgressFacts, Facts, Flow, Source
from agent.operate.explain.model import EgressAnswer
from agent.operate.pinned.egress import destination_text
from agent.policy import egress_types
from bpf import egress_evaluation
from bpf.egress_evaluation import EgressAttempt
from bpf.host_egress_tables import EgressRule
from bpf.rule_evaluation import Cgroup

TCP, UDP = 6, 17

_ENDINGS = {TCP: "connect(2) fails with EPERM", UDP: "sendmsg(2) fails with EPERM"}


@dataclasses.dataclass(frozen=True, slots=True)
class EgressVerdict:
    """answer: a phrase. rule: that denies the flow, None if none does; is_enforced: whether its
    policy is in force, or only counts."""

    answer: str
    rule: EgressRule | None = None
    is_enforced: bool = False


def evaluate(facts: Facts, source: Source, flow: Flow, now_ns: int) -> EgressVerdict | None:
    """As check_call, or egress_packet where no call names the destination. None where no policy
    is about such a source."""
    egress, cgroup = facts.egress, source.cgroup
    if egress is None or cgroup is None:
        return None
    if not egress.hooks.intersection(_programs(flow)):
        return EgressVerdict("the programs are not attached")
    if flow.reply and flow.protocol == TCP:
        return EgressVerdict("not evaluated: the peer may have opened the connection")
    policies = egress_evaluation.policies_of(egress.table, cgroup)
    if not policies:
        return EgressVerdict("the source is no subject of a HostEgressPolicy")
    rule = egress_evaluation.find_policy(egress.table, policies, _attempt(egress, flow))
    if rule is None:
        return EgressVerdict("no HostEgressPolicy of the source denies this destination")
    if facts.node.is_kubelet_cgroup(cgroup):
        return EgressVerdict("the kubelet is never a subject")
    if facts.node.is_dead_man_expired(now_ns):
        return EgressVerdict("no agent for --dead-man-hours: policies are without effect")
    text = f"HostEgressPolicy {egress.names[rule.policy]} denies {destination_text(rule)}"
    if egress_evaluation.is_enforced(egress.table, rule.policy):
        ending = _ENDINGS.get(flow.protocol, "dropped")
        return EgressVerdict(f"{text}: {ending}", rule, is_enforced=True)
    return EgressVerdict(f"{text}: would be denied; in audit it is counted", rule)


def answers(facts: Facts, source: Source, flow: Flow) -> list[EgressAnswer]:
    """All destinations of all policies; empty if none of these names the source or excepts it."""
    egress, cgroup = facts.egress, source.cgroup
    if (
        egress is None
        or cgroup is None
        or egress.table.subjects.keys().isdisjoint(cgroup.ancestors)
    ):
        return []
    return [_answer(egress, rule, cgroup, flow) for rule in egress.table.rules]


def answer(
    facts: Facts, rule: EgressRule | None, source: Source, flow: Flow
) -> EgressAnswer | None:
    """The destination of `EgressVerdict.rule`."""
    if rule is None:
        return None
    assert facts.egress is not None
    assert source.cgroup is not None
    return _answer(facts.egress, rule, source.cgroup, flow)


def _answer(egress: EgressFacts, rule: EgressRule, cgroup: Cgroup, flow: Flow) -> EgressAnswer:
    is_enforced = egress_evaluation.is_enforced(egress.table, rule.policy)
    return EgressAnswer(
        policy=egress.names[rule.policy],
        action=egress_types.ENFORCE if is_enforced else egress_types.AUDIT,
        destination=destination_text(rule),
        mismatch=_mismatch(egress, rule, cgroup, flow),
    )


def _mismatch(egress: EgressFacts, rule: EgressRule, cgroup: Cgroup, flow: Flow) -> str:
    """Why the rule does not match, in a phrase; empty if it does."""
    attempt = _attempt(egress, flow)
    if not egress_evaluation.policies_of(egress.table, cgroup) >> rule.policy & 1:
        above = (egress.table.subjects.get(ancestor) for ancestor in cgroup.ancestors)
        is_subject = any(one and one.denied >> rule.policy & 1 for one in above)
        return "the source is excepted" if is_subject else "the source is no subject"
    if not egress_evaluation.is_destination(rule, attempt):
        return "another destination"
    if not egress_evaluation.is_protocol(rule, attempt):
        return "another protocol"
    return "" if egress_evaluation.is_port(rule, attempt) else "another port"


def _attempt(egress: EgressFacts, flow: Flow) -> EgressAttempt:
    to = egress_evaluation.replace_unspecified(flow.address)
    is_nodes = to.is_loopback or egress.is_nodes
    return EgressAttempt(to, flow.protocol, flow.port, is_nodes)


def _programs(flow: Flow) -> set[str]:
    """Those that evaluate a call or a packet of the flow."""
    version = flow.address.version
    calls = {TCP: {f"egress_connect{version}"}, UDP: {f"egress_sendmsg{version}"}}
    return {"egress_packet"} | calls.get(flow.protocol, set())
