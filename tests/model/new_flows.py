"""Who may open a flow to a pod: part of the gate's specification (gate.py). What rules admit is
specified by bpf/rule_evaluation.py, which is used here.
"""

from bpf.rule_evaluation import NewFlow, find_rule
from bpf.rules import SourceKind
from bpf.verdicts import Mode, Reason
from tests.model.arrival import Case, Found
from tests.model.facts import NOWHERE, Kind, Stamp
from tests.model.packet import TCP, syn_ends

MAY_BE = (Reason.UNIDENTIFIED, Reason.STALE)
"""Of a flow that may be the kubelet's."""


# ----------------------------------------------------------------------------------------- hairpins


def hairpin(case: Case) -> Found:
    if case.hairpin is None:
        return None
    to, port = syn_ends(case.sent.frame)
    if to not in case.gate.addresses and not case.gate.has_any_address:
        return Reason.STRAY
    node, cgroup = case.state.node, case.hairpin.cgroup
    is_kubelet = node.is_kubelet_cgroup(cgroup) and case.gate.mode is not Mode.STRICT
    flow = NewFlow(TCP, port, cgroup, is_kubelet=is_kubelet)
    found = find_rule(case.gate.rules, flow) if cgroup else None
    if found is not None:
        return Reason.PROBE if found.source is SourceKind.KUBELET else Reason.RULE
    return dead_man(case) or Reason.HAIRPIN


# ---------------------------------------------------------------------------------------- new flows


def behind_pod(case: Case) -> Found:
    return case.dropped if case.is_behind_pod else None


def admitted_before(case: Case) -> Found:
    match case.stamp:
        case Stamp.RULE:
            return Reason.RULE
        case Stamp.PROBE:
            return Reason.PROBE
        case Stamp.UNIDENTIFIED:
            return maybe_kubelet(case)
    return None


def maybe_kubelet(case: Case) -> Reason:
    return Reason.STALE if case.state.node.kubelet_cgroups else Reason.UNIDENTIFIED


def rule(case: Case) -> Found:
    node, packet = case.state.node, case.packet
    cgroup = case.socket.cgroup if case.socket else None
    flow = NewFlow(
        packet.protocol,
        packet.ports[1],
        cgroup,
        is_kubelet=node.may_be_kubelet(cgroup, case.now_ns) and not is_past_relay(case),
        is_kernel=case.has_no_origin,
    )
    found = find_rule(case.gate.rules, flow)
    if found is None:
        return None
    if found.source is not SourceKind.KUBELET:
        return Reason.RULE
    return Reason.PROBE if node.is_kubelet_cgroup(cgroup) else maybe_kubelet(case)


def is_past_relay(case: Case) -> bool:
    """The identified kubelet, to a pod in strict, though a relay proxies this port."""
    gate, socket, state = case.gate, case.socket, case.state
    is_kubelet = socket is not None and state.node.is_kubelet_cgroup(socket.cgroup)
    if socket is None or not is_kubelet or gate.mode is not Mode.STRICT:
        return False
    if not gate.has_fallback:
        return True
    to, port = case.packet.destination, case.packet.ports[1]
    leaves_translated = state.proxied.get((to, port), state.proxied.get((to, 0)))
    if not case.is_tcp or not state.is_relay_alive or leaves_translated is None:
        return False
    if socket.kind is not Kind.TCP:
        return socket.kind is not Kind.REQUEST
    if socket.connected in (None, to):
        return False
    return not leaves_translated or socket.connected == NOWHERE


def dead_man(case: Case) -> Found:
    is_expired = case.state.node.is_dead_man_expired(case.now_ns)
    return Reason.DEAD_MAN if is_expired else None


def switch(case: Case) -> Found:
    may_be_anothers = case.has_no_origin and not case.is_stray
    return Reason.SWITCH if case.state.node.has_ovs and may_be_anothers else None


def past_relay(case: Case) -> Found:
    return Reason.STRICT if is_past_relay(case) else None


def rest(case: Case) -> Found:
    return case.dropped
