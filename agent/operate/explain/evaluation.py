"""The verdict on a flow: the steps that hooks, relay, default-deny table and gate evaluate, in
order. Pure functions; each step names the source that it follows.

Tests compare it with what the kernel does: with the gate's own program on the same facts
(tests/kernel/test_explain_program.py) and with real traffic (tests/kernel/test_explain.py).
"""

import dataclasses

import msgspec

from agent.operate.explain import egress, model
from agent.operate.explain.facts import (
    HOST,
    KERNEL,
    POD,
    DefaultDenyFacts,
    Facts,
    Flow,
    GateFacts,
    Source,
)
from agent.operate.explain.model import Step
from bpf.host_egress_tables import EgressRule
from bpf.rule_evaluation import NewFlow, find_rule
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict

TCP, UDP, ICMP, ICMPV6 = 6, 17, 1, 58
_HOST_EGRESS = "host egress"


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """The verdict, the step that decides it, and all steps. reason: None if no gate, hook or table
    has a reason for it; rule: that admits it; gate: that evaluates it, or would; egress_rule: of a
    HostEgressPolicy that denies it, or would."""

    verdict: Verdict
    decided_by: str
    reason: Reason | None
    steps: tuple[Step, ...]
    gate: GateFacts | None = None
    rule: Rule | None = None
    egress_rule: EgressRule | None = None

    @property
    def text(self) -> str:
        return next(step.answer for step in self.steps if step.is_deciding)


def evaluate(facts: Facts, source: Source, flow: Flow, now_ns: int) -> Evaluation:
    """now_ns: CLOCK_MONOTONIC."""
    return _Evaluator(facts, source, flow, now_ns).run()


def new_flow(source: Source, flow: Flow, *, is_kubelet: bool) -> NewFlow:
    """What rules are compared with."""
    is_kernel = source.origin == KERNEL
    return NewFlow(flow.protocol, flow.port, source.cgroup, is_kubelet, is_kernel)


def _counted(found: Evaluation) -> Evaluation:
    """What passes, but for a HostEgressPolicy in audit, which counts it."""
    steps = tuple(
        msgspec.structs.replace(step, is_deciding=step.name == _HOST_EGRESS) for step in found.steps
    )
    return dataclasses.replace(
        found,
        verdict=Verdict.WOULD_DROP,
        decided_by=model.HOST_EGRESS,
        reason=Reason.HOST_EGRESS,
        steps=steps,
    )


class _Evaluator:
    """One evaluation. Each step returns the evaluation if it decides, otherwise None."""

    def __init__(self, facts: Facts, source: Source, flow: Flow, now_ns: int) -> None:
        self._facts = facts
        self._source = source
        self._flow = flow
        self._now_ns = now_ns
        self._steps: list[Step] = []
        self._denied: EgressRule | None = None
        """By a HostEgressPolicy, in force or in audit."""
        self._gate = facts.gate_of(flow.address)
        self._may_be_kubelet = facts.node.may_be_kubelet(source.cgroup, now_ns)
        self._is_kubelet = facts.node.is_kubelet_cgroup(source.cgroup)

    def run(self) -> Evaluation:
        found = self._decide()
        if self._denied is None:
            return found
        found = dataclasses.replace(found, egress_rule=self._denied)
        return _counted(found) if found.verdict is Verdict.PASS else found

    def _decide(self) -> Evaluation:
        for step in (
            self._origin,
            self._host_egress,
            self._relay,
            self._hook,
            self._default_deny,
            self._attached,
            self._reply,
            self._destination,
            self._grace,
            self._rules,
            self._dead_man,
            self._switch,
        ):
            if found := step():
                return found
        return self._drop_new_flow()

    # Before the gate

    def _origin(self) -> Evaluation | None:
        source = "bpf/src/origin.h: is_host_sent"
        text = self._source.text
        if self._source.origin in (HOST, KERNEL):
            self._add("origin", f"from {text}: a host packet", source)
            return None
        whence = "a pod" if self._source.origin == POD else "outside this node"
        text = f"packets from {whence} are forwarded, and NetworkPolicy handles them"
        return self._end(Verdict.PASS, model.FORWARDED, None, "origin", text, source)

    def _host_egress(self) -> Evaluation | None:
        found = egress.evaluate(self._facts, self._source, self._flow, self._now_ns)
        if found is None:
            return None
        self._denied = found.rule
        name, source = _HOST_EGRESS, "bpf/src/host_egress.c: find_policy"
        if not found.is_enforced:
            self._add(name, found.answer, source)
            return None
        deciders = Verdict.DROP, model.HOST_EGRESS, Reason.HOST_EGRESS
        return self._end(*deciders, name, found.answer, source)

    def _relay(self) -> Evaluation | None:
        flow, relay = self._flow, self._facts.relay
        source = "bpf/src/relay.c: redirect"
        address = relay.address_of(flow.address, flow.port)
        is_strict = self._gate is not None and self._gate.mode is Mode.STRICT
        if flow.protocol != TCP or self._is_answer or not (is_strict or address):
            return None
        if not self._is_kubelet:
            self._add("relay", "the source is not the kubelet: not redirected", source)
        elif not relay.is_hooked or not relay.is_alive(self._now_ns):
            what = "no relay serves" if not relay.is_hooked else "the relay hangs"
            self._add("relay", f"{what}: the kubelet connects to the pod itself", source)
        elif address is None:
            self._add("relay", f"it does not proxy port {flow.port} of this pod", source)
        else:
            text = (
                f"the connect is redirected to the relay ({address}), which connects to the pod "
                "from inside its network namespace"
            )
            return self._end(Verdict.PASS, model.RELAY, Reason.PROBE, "relay", text, source)
        return None

    def _hook(self) -> Evaluation | None:
        if self._source.origin == KERNEL or self._is_answer:
            return None
        flow, hook = self._flow, self._connect_hook_name
        if hook not in self._facts.hooks:
            if flow.protocol in (TCP, UDP):
                self._add("connect hook", f"{hook} is not attached", "bpf/src/hooks.c")
            return None
        if flow.protocol == UDP:
            return self._tunnel_port()
        return self._connect_hook() if flow.protocol == TCP else None

    @property
    def _connect_hook_name(self) -> str:
        return "hook_connect4" if self._flow.address.version == 4 else "hook_connect6"

    def _tunnel_port(self) -> Evaluation | None:
        node, source = self._facts.node, "bpf/src/hooks.c: check_tunnel_port"
        if self._flow.port not in node.tunnel_ports:
            return None
        if node.is_dead_man_expired(self._now_ns):
            return None
        text = "UDP to a port of the node's tunnels is rejected with EPERM: it could encapsulate"
        return self._end(
            Verdict.DROP, model.CONNECT_HOOK, Reason.TUNNEL, "connect hook", text, source
        )

    def _connect_hook(self) -> Evaluation | None:
        """check_connect: the pod's gate decides, by the address's owner."""
        flow, facts = self._flow, self._facts
        source = "bpf/src/hooks.c: check_connect"
        is_denied = (flow.address, flow.port) in facts.denied_host_probes
        if is_denied and self._is_kubelet and not facts.node.is_stale(self._now_ns):
            text = "the host of a probe or hook names this address: rejected with EPERM"
            return self._end(Verdict.DROP, model.CONNECT_HOOK, None, "connect hook", text, source)
        gate = facts.gates.get(facts.owners.get(flow.address, 0))
        if gate is None or gate.mode < Mode.ENFORCE:
            self._add("connect hook", "allows: no enforcing gate for this address", source)
            return None
        is_kubelet = self._may_be_kubelet_at(gate)
        rule = find_rule(gate.rules, new_flow(self._source, flow, is_kubelet=is_kubelet))
        if rule or facts.node.is_dead_man_expired(self._now_ns):
            self._add("connect hook", "allows, as the gate does", source)
            return None
        self._add("rules", self._no_rule(gate), "bpf/src/rules.h: find_rule")
        text = "connect(2) fails with EPERM: no rule of the pod's gate admits the source"
        return self._end(
            Verdict.DROP, model.CONNECT_HOOK, Reason.NODE, "connect hook", text, source
        )

    def _default_deny(self) -> Evaluation | None:
        """It sees neither packet sockets nor the kernel's own packets."""
        table, route = self._facts.default_deny, self._facts.route
        source = "agent/default_deny/ruleset.py"
        if table is None or not self._facts.is_veth or self._source.origin == KERNEL:
            return None
        if self._is_answer:
            return None
        if route in table.classified:
            self._add("default-deny", "the interface is left to its gate", source)
            return None
        if self._flow.protocol != TCP and not table.tracks:
            self._add("default-deny", "without connection tracking it covers TCP only", source)
            return None
        if self._is_admitted_by(table):
            self._add("default-deny", "admits what may be the kubelet", source)
            return None
        text = "the interface has no gate yet, and its new flows are dropped until it has"
        return self._end(Verdict.DROP, model.DEFAULT_DENY, None, "default-deny", text, source)

    def _is_admitted_by(self, table: DefaultDenyFacts) -> bool:
        """The chains `kubelet` and `orphaned`, and `set_kubelet_priority` of bpf/src/hooks.c."""
        node, cgroup = self._facts.node, self._source.cgroup
        if cgroup is None or table.is_kubelet(cgroup):
            return cgroup is not None
        if self._flow.protocol != TCP:
            return False
        is_confirmed = cgroup.id == node.kubelet_cgroup and not node.is_stale(self._now_ns)
        has_priority = node.is_unit_followed and self._is_kubelet and not is_confirmed
        if table.admits_priority and has_priority and self._connect_hook_name in self._facts.hooks:
            return True
        return (table.is_open or not table.is_alive) and not node.is_in_pod(cgroup)

    # The gate

    def _attached(self) -> Evaluation | None:
        gate, source = self._gate, "bpf/src/gate.c: gate_egress"
        if gate is None:
            text = f"no gate has {self._flow.address}: no pod of this node in audit or stricter"
            return self._end(Verdict.PASS, model.NO_GATE, None, "gate", text, "bpf/src/gates.h")
        if not gate.is_attached:
            text = f"the gate is not attached to {gate.interface}: everything passes"
            return self._end(Verdict.PASS, model.NO_GATE, None, "gate", text, source)
        if gate.mode is Mode.OFF:
            text = f"the gate on {gate.interface} is off: everything passes"
            return self._end(Verdict.PASS, model.GATE, None, "gate", text, source)
        self._add("gate", f"attached to {gate.interface}, mode {gate.mode.label}", source)
        return None

    @property
    def _is_answer(self) -> bool:
        """Whether it is a reply to a flow of the pod: no new flow, so only the gate sees it."""
        return bool(self._flow.reply)

    def _reply(self) -> Evaluation | None:
        flow = self._flow
        source = (
            "bpf/src/tcp.h: evaluate_tcp" if flow.protocol == TCP else "bpf/src/replies.h: is_reply"
        )
        if flow.reply is None:
            if flow.protocol == TCP:
                self._add("reply", "a SYN is a new flow; replies to the pod pass", source)
            return None
        if not flow.reply:
            self._add("reply", "the pod has opened no such flow: a new one", source)
            return None
        if flow.protocol == TCP:
            reason = Reason.ESTABLISHED
            text = "the connection is open: its segments pass, whichever side opened it"
        else:
            reason = Reason.REPLY
            text = "replies pass: the pod opened this flow"
        return self._end(Verdict.PASS, model.GATE, reason, "reply", text, source)

    def _destination(self) -> Evaluation | None:
        gate, flow = self._own_gate, self._flow
        source = "bpf/src/gate.c: gate_for_address"
        if flow.address in gate.addresses:
            self._add("destination", f"{flow.address} is an address of this gate's pod", source)
        else:
            owner = self._facts.gates.get(self._facts.owners.get(flow.address, 0))
            is_owned = owner is not None and owner.mode >= Mode.ENFORCE
            if gate.mode < Mode.ENFORCE and owner is not None and is_owned:
                self._gate = owner
            elif not gate.has_any_address:
                text = f"{flow.address} is no address of the pod behind {gate.interface}"
                return self._drop(Reason.STRAY, "destination", text, source)
            self._add("destination", f"{flow.address} counts as this gate's", source)
        if flow.protocol == TCP and flow.port == 0:
            text = "TCP to port 0 is a path test"
            return self._drop(Reason.PATH_TEST, "destination", text, "bpf/src/tcp.h")
        return None

    def _grace(self) -> Evaluation | None:
        """`is_in_grace`: not for TCP, nor without a socket of the flow's protocol."""
        gate = self._own_gate
        if self._flow.protocol == TCP or self._now_ns >= gate.grace_until_ns:
            return None
        text = "grace period: it may be a reply to a flow from before the gate"
        source = "bpf/src/gate.c: is_in_grace"
        return self._end(Verdict.PASS, model.GATE, Reason.GRACE, "grace", text, source)

    def _may_be_kubelet_at(self, gate: GateFacts) -> bool:
        """`bpf/src/rules.h`: may_be_kubelet_at."""
        return self._is_kubelet if gate.identified_kubelet else self._may_be_kubelet

    def _rules(self) -> Evaluation | None:
        gate, source = self._own_gate, "bpf/src/new_flow.h: evaluate_new_flow"
        is_rejected = self._is_rejected_kubelet
        is_kubelet = self._may_be_kubelet_at(gate) and not is_rejected
        rule = find_rule(gate.rules, new_flow(self._source, self._flow, is_kubelet=is_kubelet))
        if rule is None:
            self._add("rules", self._no_rule(gate), "bpf/src/rules.h: find_rule")
            return None
        if rule.source is not SourceKind.KUBELET:
            reason, text = Reason.RULE, "a rule admits the source"
        elif self._is_kubelet:
            reason, text = Reason.PROBE, "the kubelet, to a port that the pod declares"
        else:
            reason, why = Reason.UNIDENTIFIED, "the kubelet is not identified"
            if self._facts.node.kubelet_cgroups:
                reason = Reason.STALE
                why = "the heartbeat is stale and the kernel does not follow the kubelet"
            text = f"{why}: host processes outside pods reach ports that the pod declares"
        return self._end(Verdict.PASS, model.GATE, reason, "rules", text, source, rule)

    def _dead_man(self) -> Evaluation | None:
        if not self._facts.node.is_dead_man_expired(self._now_ns):
            return None
        text = "no agent for --dead-man-hours: all gates are open"
        source = "bpf/src/rules.h: is_dead_man_expired"
        return self._end(Verdict.PASS, model.GATE, Reason.DEAD_MAN, "dead man", text, source)

    def _switch(self) -> Evaluation | None:
        if not self._facts.node.has_ovs or self._source.origin != KERNEL:
            return None
        text = "a packet without a socket, on a node with Open vSwitch: it may be forwarded"
        source = "bpf/src/new_flow.h: evaluate_new_flow"
        return self._end(Verdict.PASS, model.GATE, Reason.SWITCH, "switch", text, source)

    def _drop_new_flow(self) -> Evaluation:
        source = "bpf/src/new_flow.h: drop_reason"
        if self._is_rejected_kubelet:
            text = "the kubelet, to a pod in strict, but not through the relay"
            return self._drop(Reason.STRICT, "verdict", text, source)
        if self._source.origin == KERNEL:
            text = "a new flow of the host kernel, without a rule for it"
            return self._drop(Reason.KERNEL, "verdict", text, source)
        return self._drop(Reason.NODE, "verdict", "a new flow of a host process", source)

    @property
    def _own_gate(self) -> GateFacts:
        assert self._gate is not None  # `_attached` ends without one
        return self._gate

    @property
    def _is_rejected_kubelet(self) -> bool:
        """`is_rejected_kubelet`. A TCP socket that no relay's hook has seen bypasses none."""
        gate = self._own_gate
        return self._is_kubelet and gate.mode is Mode.STRICT and not gate.has_fallback

    def _no_rule(self, gate: GateFacts) -> str:
        return f"{len(gate.rules)} rules, none matches" if gate.rules else "the gate has no rules"

    def _add(self, name: str, answer: str, source: str, *, is_deciding: bool = False) -> None:
        self._steps.append(Step(name=name, answer=answer, source=source, is_deciding=is_deciding))

    def _drop(self, reason: Reason, name: str, text: str, source: str) -> Evaluation:
        """In audit it would be dropped, and passes."""
        is_audit = self._own_gate.mode is Mode.AUDIT
        verdict = Verdict.WOULD_DROP if is_audit else Verdict.DROP
        ending = "would be dropped; in audit it passes" if is_audit else "dropped"
        return self._end(verdict, model.GATE, reason, name, f"{text}: {ending}", source)

    def _end(
        self,
        verdict: Verdict,
        decided_by: str,
        reason: Reason | None,
        name: str,
        text: str,
        source: str,
        rule: Rule | None = None,
    ) -> Evaluation:
        self._add(name, text, source, is_deciding=True)
        return Evaluation(verdict, decided_by, reason, tuple(self._steps), self._gate, rule)
