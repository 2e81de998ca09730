"""Explains a flow: from names to facts, to the verdict, to what would change it. Blocks."""

import dataclasses
import ipaddress
import pathlib
import time

from agent.admin.observations import Observations
from agent.admin.report import AgentReport
from agent.errors import PodgateError
from agent.listing import full_name
from agent.operate.explain import (
    changes,
    confirmation,
    egress,
    evaluation,
    facts,
    observed,
    policies,
    reading,
    replies,
    rule_answers,
)
from agent.operate.explain.evaluation import ICMP, ICMPV6, TCP, Evaluation
from agent.operate.explain.facts import Flow, GateFacts, Source
from agent.operate.explain.model import (
    AgentFacts,
    Explanation,
    NearMiss,
    RuleAnswer,
    SourceFacts,
    TargetFacts,
)
from agent.operate.explain.pods import NamedPod, NamedPods, read_saved
from agent.operate.explain.sources import SourceName, Sources
from agent.operate.pinned import installation as pinned_installation
from agent.operate.pinned.exposures import in_words
from agent.operate.pinned.names import Names
from agent.pods.object_labels import LabelSnapshot
from agent.policy import near_misses
from bpf import loader, pins
from bpf.abi import IPAddress
from bpf.rule_evaluation import NodeFacts
from bpf.verdicts import Reason, Verdict

PROTOCOLS = {"tcp": TCP, "udp": 17, "sctp": 132, "icmp": ICMP, "icmpv6": ICMPV6}
# Those after these are less likely the mistake.
_NEAR_MISSES = 5
_WITH_PORTS = ("tcp", "udp", "sctp")


class QuestionError(PodgateError):
    """The question has no answer as it is; one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What to explain. to: a pod's name or address; protocol: a key of `PROTOCOLS`; source_port: of
    the source, for a reply; source_address: the address that the pod sent to, if it is not one of
    the node's."""

    source: SourceName
    to: str
    protocol: str
    port: int = 0
    source_port: int = 0
    source_address: IPAddress | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError`."""
        if self.protocol in _WITH_PORTS and not self.port:
            raise ValueError(f"{self.protocol} has ports: name the pod's by --port")
        if self.protocol not in _WITH_PORTS and (self.port or self.source_port):
            raise ValueError(f"{self.protocol} has no ports: leave out --port and --source-port")


@dataclasses.dataclass(frozen=True, slots=True)
class AgentAnswers:
    """The agent's answers; None if it does not respond."""

    report: AgentReport | None = None
    observations: Observations | None = None


def explain(
    question: Question,
    installation: pins.Pins,
    run_directory: pathlib.Path,
    agent: AgentAnswers,
) -> Explanation:
    """Raises `PinsUnreadableError`, `PodNotFoundError`, `SourceError` or `QuestionError`."""
    with pinned_installation.opened(installation) as loaded:
        return _Answer(question, installation, run_directory, agent, loaded).explanation()


class _Answer:
    def __init__(
        self,
        question: Question,
        installation: pins.Pins,
        run_directory: pathlib.Path,
        agent: AgentAnswers,
        loaded: loader.Loaded,
    ) -> None:
        self._question = question
        self._installation = installation
        self._loaded = loaded
        self._agent = agent
        self._names = Names(run_directory)
        gates = reading.gates(installation, loaded)
        saved = read_saved(run_directory)
        self._pods = NamedPods(
            agent.report,
            saved,
            (
                (pod, gate.confirmed)
                for gate in gates
                if (pod := self._names.pod(gate.ifindex)).name
            ),
        )
        self._pod, self._address = self._target(gates)
        self._facts = reading.read(installation, loaded, self._address)
        if agent.observations is not None:
            documents = policies.decode(agent.observations.policies)
            node_labels = agent.observations.node_labels
        else:
            documents = policies.read_saved(run_directory)
            node_labels = (
                saved.nodes.objects[0].metadata.labels if saved and saved.nodes.objects else {}
            )
        self._policies = policies.Policies(documents, LabelSnapshot(node_labels))
        self._node_labels = node_labels
        self._own_addresses = _own_addresses()

    def explanation(self) -> Explanation:
        sources = Sources(self._pods, own_addresses=self._own_addresses, owners=self._facts.owners)
        source = sources.find(self._question.source)
        now_ns = time.monotonic_ns()
        flow = self._flow(now_ns)
        found, confirmed = confirmation.confirm(
            *(self._installation, self._facts, source, flow),
            evaluation.evaluate(self._facts, source, flow, now_ns),
        )
        is_kubelet = self._facts.node.is_kubelet_cgroup(source.cgroup)
        policy = self._policies.name_of(found.rule.id) if found.rule else ""
        rules = self._rules(found, source, flow, now_ns)
        denied = egress.answer(self._facts, found.egress_rule, source, flow)
        return Explanation(
            verdict=found.verdict.label,
            decided_by=found.decided_by,
            reason=found.reason.label if found.reason is not None else "",
            text=f"HostAccessPolicy {policy} admits the source" if policy else found.text,
            source=SourceFacts(
                origin=source.origin,
                text=source.text,
                cgroup=source.cgroup.path if source.cgroup else "",
                cgroup_id=source.cgroup.id if source.cgroup and source.cgroup.path else 0,
                is_kubelet=is_kubelet,
            ),
            target=self._target_facts(found.gate),
            agent=agent_facts(self._facts.node, now_ns, is_alive=self._agent.report is not None),
            steps=list(found.steps),
            rule=next((rule for rule in rules if not rule.mismatch), None) if found.rule else None,
            rules=rules,
            near_misses=self._near_misses(found, source, flow, is_kubelet=is_kubelet),
            changes=changes.changes(
                *(found, source, flow, self._pod, self._pods),
                is_kubelet=is_kubelet,
                policy=policy,
                denied_by=denied.policy if denied else "",
            ),
            notes=self._notes(source),
            confirmation=confirmed,
            egress_rule=denied,
            egress_rules=egress.answers(self._facts, source, flow),
        )

    def _target(self, gates: list[GateFacts]) -> tuple[NamedPod | None, IPAddress]:
        to, protocol = self._question.to, self._question.protocol
        try:
            address = ipaddress.ip_address(to)
        except ValueError:
            pod: NamedPod | None = self._pods.find(to)
        else:
            if (address.version == 4 and protocol == "icmpv6") or (
                address.version == 6 and protocol == "icmp"
            ):
                raise QuestionError(f"{protocol} is of the other family than {address}")
            return self._pods.with_address(address) or self._gated(gates, address), address
        assert pod is not None
        version = {"icmp": 4, "icmpv6": 6}.get(protocol)
        listed = (*pod.own_addresses, *pod.addresses)
        found = [a for a in listed if version in (None, a.version)]
        if not found:
            raise QuestionError(
                f"no address of pod {pod.full_name} is known for {protocol}; does it run? Name "
                "the address itself in --to"
            )
        return pod, found[0]

    def _gated(self, gates: list[GateFacts], address: IPAddress) -> NamedPod | None:
        """The pod that the agent has saved for the gate with this address."""
        listed = [gate for gate in gates if address in gate.addresses]
        if len(listed) != 1:
            return None
        saved = self._names.pod(listed[0].ifindex)
        if not saved.name:
            return None
        return self._pods.find(full_name(saved.namespace, saved.name))

    def _flow(self, now_ns: int) -> Flow:
        question = self._question
        protocol = PROTOCOLS[question.protocol]
        reply: bool | None = None
        if question.source_port:
            pod = self._address, question.port
            gate = self._facts.gate_of(self._address)
            if protocol == TCP:
                reply = replies.is_connected(pod, question.source_port)
            else:
                peers = [*self._own_addresses]
                if question.source_address:
                    peers = [question.source_address]
                reply = gate is not None and replies.is_recorded(
                    *(self._loaded, gate.ifindex, protocol, pod, peers),
                    *(question.source_port, now_ns),
                )
        return Flow(self._address, protocol, question.port, reply)

    def _rules(
        self, found: Evaluation, source: Source, flow: Flow, now_ns: int
    ) -> list[RuleAnswer]:
        if found.gate is None or not any(step.name == "rules" for step in found.steps):
            return []
        self._names.learn({rule.cgroup for rule in found.gate.rules if rule.cgroup})
        is_kubelet = self._facts.node.may_be_kubelet(source.cgroup, now_ns)
        return rule_answers.answers(
            found.gate.rules,
            evaluation.new_flow(source, flow, is_kubelet=is_kubelet),
            path_of=self._names.cgroup,
            policy_of=self._policies.name_of,
        )

    def _near_misses(
        self, found: Evaluation, source: Source, flow: Flow, *, is_kubelet: bool
    ) -> list[NearMiss]:
        """Of a flow that no rule admits, and that a policy could admit."""
        if self._pod is None or found.gate is None or is_kubelet:
            return []
        if found.verdict is Verdict.PASS or found.reason not in (Reason.NODE, Reason.KERNEL):
            return []
        ports = self._names.pod(found.gate.ifindex).named_ports
        seen = observed.flows(source, flow, self._pod, self._pods, named_ports=ports)
        if seen is None:
            return []
        missed = near_misses.near_misses(self._policies.policies, seen, self._node_labels)
        return [
            NearMiss(policy=one.policy, mismatch=one.miss.value, text=one.text)
            for one in missed[:_NEAR_MISSES]
        ]

    def _target_facts(self, gate: GateFacts | None) -> TargetFacts:
        return TargetFacts(
            address=str(self._address),
            port=self._question.port,
            protocol=self._question.protocol,
            namespace=self._pod.namespace if self._pod else "",
            pod=self._pod.name if self._pod else "",
            interface=gate.interface if gate else "",
            mode=gate.mode.label if gate else "",
        )

    def _notes(self, source: Source) -> list[str]:
        notes = []
        if self._pod and self._address not in self._pod.own_addresses:
            notes.append(
                f"{self._address} is not confirmed for {self._pod.full_name}: if another pod has "
                "it, the answer is for that pod."
            )
        others = [str(a) for a in self._pod.addresses if a != self._address] if self._pod else []
        if others:
            notes.append(f"The pod also has {', '.join(others)}; name one in --to to explain it.")
        if self._question.source.kind == "pid" and source.origin == facts.HOST:
            notes.append(
                "A socket keeps the cgroup in which it was created, so older sockets of a process "
                "that was moved may get another answer."
            )
        return notes


def agent_facts(node: NodeFacts, now_ns: int, *, is_alive: bool) -> AgentFacts:
    """What the agent's state means for the gates."""
    age_ns = node.heartbeat_age_ns(now_ns)
    return AgentFacts(
        state="alive" if is_alive else "dead",
        heartbeat_age_seconds=None if age_ns is None else age_ns / 1e9,
        consequence=_consequence(node, now_ns),
    )


def _consequence(node: NodeFacts, now_ns: int) -> str:
    if node.is_dead_man_expired(now_ns):
        return "all gates are open, since no agent ran for --dead-man-hours"
    if not node.kubelet_cgroups:
        return "ports that pods declare are open to host processes: no kubelet is identified"
    if node.is_kubelet_unsure(now_ns):
        return "the heartbeat is stale: ports that pods declare are open to host processes"
    age_ns = node.heartbeat_age_ns(now_ns)
    if age_ns is None or not node.dead_man_ns:
        return "gates and rules stay in force without an agent"
    left = in_words((node.dead_man_ns - age_ns) / 1e9)
    return f"without an agent gates and rules stay in force, and all gates open in {left}"


def _own_addresses() -> frozenset[IPAddress]:
    """The node's, in the calling thread's network namespace."""
    # The agent imports this package for readers of pods, and would take 9 MB more.
    import pyroute2

    with pyroute2.IPRoute() as netlink:
        texts = [found.get_attr("IFA_ADDRESS") for found in netlink.get_addr()]
        texts += [found.get_attr("IFA_LOCAL") for found in netlink.get_addr()]
    return frozenset(ipaddress.ip_address(text) for text in texts if text)
