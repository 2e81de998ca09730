"""The responses of the agent's HTTP servers: metrics, status, drops, rules and health."""

import asyncio
import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from agent import VERSION
from agent.admin import findings
from agent.admin.finding import Finding
from agent.admin.observations import Observations
from agent.admin.report import (
    AgentReport,
    DropEvents,
    Drops,
    GateStatus,
    HookStatus,
    PathStatus,
    PodProblem,
    PodSourceStatus,
    PodStatus,
    RawSocketStatus,
    RelayStatus,
    RulesReport,
)
from agent.app import node_summary
from agent.app.answer_report import AnswerReport
from agent.app.component_metrics import Check
from agent.app.drop_reporting import DropReporting
from agent.app.exporter import Exporter
from agent.app.gating import Gating
from agent.app.handover import Handover
from agent.app.isolation_conditions import IsolationConditions
from agent.app.ports import Ports
from agent.kube.node_report import NodeSummary
from agent.pods import isolation
from agent.pods.conditions import TRUE
from agent.pods.pod import Pod
from agent.pods.pod_state import PodState
from agent.policy.cluster_network_policies import report as network_policy_report
from agent.policy.egress_report import HostEgressReport
from agent.policy.staged import StagedPolicies
from agent.probing.manager import ProbeManager
from agent.strict import targets as strict_targets
from agent.strict.process import RelayError
from agent.strict.stats import ConnectionStats
from agent.strict.supervisor import RelaySupervisor
from bpf import sources as bpf_sources
from bpf.counters import labelled
from bpf.gates import Counts
from bpf.verdicts import Mode

if TYPE_CHECKING:
    # Imported only where they are configured.
    from agent.api.conditions.service import ConditionsService
    from agent.app.cluster_outputs import ClusterOutputs
    from agent.services.api.source import ServiceEndpoints


class Reports:
    """Makes the content of the agent's HTTP responses."""

    def __init__(
        self,
        gating: Gating,
        *,
        unready_reason: Callable[[], str | None],
        outputs: "ClusterOutputs | None",
        services: "ServiceEndpoints | None",
        isolation: IsolationConditions,
        relays: RelaySupervisor,
        connections: ConnectionStats,
        probing: ProbeManager,
        answers: AnswerReport,
        drops: DropReporting,
        staged: StagedPolicies,
        egress: HostEgressReport,
        node: str,
        ports: Ports,
        metrics: Exporter,
        handover: Handover,
        checks: Mapping[str, Check],
        component_problems: Callable[[], Iterable[str]],
        conditions: "ConditionsService | None" = None,
        flow_problem: Callable[[], str] = lambda: "",
    ) -> None:
        """unready_reason: None while the agent is ready; services: of a node without a cluster;
        node: its name, empty without a cluster; checks: of components, as for
        `podgate_component_up`; component_problems: of those that fail; conditions: of other
        owners; flow_problem: why records of flows are not written."""
        self._ports = ports
        self._started = datetime.datetime.now(datetime.UTC)
        self._gating = gating
        self._unready_reason = unready_reason
        self._store = gating.store
        self._modes = gating.modes
        self._gate_worker = gating.gate_worker
        self._outputs = outputs
        self._services = services
        self._isolation = isolation
        self._relays = relays
        self._connections = connections
        self._probing = probing
        self._answers = answers
        self._drops = drops
        self._staged = staged
        self._egress = egress
        self._node = node
        self._metrics = metrics
        self._handover = handover
        self._checks = checks
        self._component_problems = component_problems
        self._conditions = conditions
        self._flow_problem = flow_problem
        self.summary: NodeSummary | None = None
        """Of the last report; findings are read every few seconds."""
        self._first_found: dict[tuple[str, str], datetime.datetime] = {}
        """By kind and subject, since when each finding is found."""

    def unhealthy_reason(self) -> str | None:
        return self._gating.unhealthy_reason()

    def unready_reason(self) -> str | None:
        return self._unready_reason()

    async def metrics(self) -> bytes:
        return await self._metrics.render()

    async def report(self) -> AgentReport:
        counts = await self._gate_worker.counts()
        node_drops = await self._gate_worker.host_drops()
        raw_sockets = await self._drops.raw_sockets.report()
        return self._report(counts, node_drops, raw_sockets)

    def findings(self) -> list[Finding]:
        """What is wrong now; without the time that reading counters takes."""
        return self._report({}, {}, self._drops.raw_sockets.summary()).findings

    def _report(
        self,
        counts: Mapping[int, Counts],
        node_drops: dict[str, int],
        raw_sockets: RawSocketStatus,
    ) -> AgentReport:
        # Nothing here waits, so that states and the conditions that follow from them agree.
        self._isolation.publish()
        states = sorted(self._store.states(), key=lambda state: state.pod.full_name)
        loaded = self._gate_worker.loaded
        kubelet, policies = self._gating.kubelet, self._gating.network_policies
        components = {name: check() for name, check in self._checks.items()}
        report = AgentReport(
            version=VERSION,
            pid=os.getpid(),
            started=self._started,
            source_hash=bpf_sources.fingerprint(),
            attachment=self._gate_worker.gates.attachment.value,
            programs=loaded.outcome.origin.value,
            load_ms=loaded.outcome.seconds * 1000,
            is_synced=self._store.is_synced,
            unsynced=self._gating.unsynced_reason() or "",
            kubelet=kubelet.path,
            kubelet_problem=kubelet.identity.problem,
            kubelet_unfollowed=kubelet.admission.problem,
            open_ports=kubelet.open_ports.problem,
            http_address=self._ports.http.address,
            server_problems=list(self._ports.problems()),
            default_mode=self._modes.node.default.label,
            max_mode=self._modes.node.ceiling.label,
            max_mode_from=self._modes.node.ceiling_from,
            in_force=self._remains(),
            label_problems=self._modes.label_problems,
            policy_problems=self._gating.policy.problems,
            network_policy_problems=policies.problems if policies else [],
            components={name: is_up for name, is_up in components.items() if is_up is not None},
            component_problems=list(self._component_problems()),
            hooks=[
                HookStatus(name=hook.name, problem=hook.problem)
                for hook in self._gate_worker.hook_states
            ],
            pod_source=self._pod_source(),
            node_drops=node_drops,
            raw_sockets=raw_sockets,
            host_probes=kubelet.host_probes.status(),
            egress_problems=self._gating.egress.problems,
            flow_problems=[text] if (text := self._flow_problem()) else [],
            pods_cgroup_problem=self._gating.pods_cgroup_problem,
            condition_owners=self._conditions.statuses() if self._conditions else [],
            condition_owner_problems=self._conditions.problems if self._conditions else [],
            policies_without_effect=self._gating.policy.without_effect,
            relay=relay_status(self._relays, self._connections, self._store.relay_gates, counts),
            pods=[self._pod_status(state, counts) for state in states],
        )
        report = msgspec.structs.replace(report, findings=self._dated(findings.find(report)))
        self.summary = node_summary.of_report(report)
        return report

    def _dated(self, found: list[Finding]) -> list[Finding]:
        """With the time since when each is found, where nothing else has it."""
        now = datetime.datetime.now(datetime.UTC)
        before, self._first_found = self._first_found, {}
        dated = []
        for one in found:
            key = one.kind, one.subject
            since = self._first_found.setdefault(key, before.get(key, now))
            dated.append(one if one.since else msgspec.structs.replace(one, since=since))
        return dated

    def _remains(self) -> list[str]:
        """What podgate has in force on the node, by kind; nothing once it is off."""
        remains = self._gating.off_switch.remains()
        if self._gating.default_deny.is_installed:
            remains.append("default-deny table")
        if self._relays.is_up:
            remains.append("relay")
        return remains

    def _pod_source(self) -> PodSourceStatus:
        found = (self._outputs or self._gating.source).status()
        services = self._services.problems() if self._services else []
        return msgspec.structs.replace(found, problems=services + found.problems)

    async def drops(self) -> Drops:
        return await self._drops.report()

    async def observations(self) -> Observations:
        policy = self._gating.policy
        seen = await asyncio.to_thread(self._drops.history.observations)
        rules = await policy.report()
        return msgspec.structs.replace(
            seen,
            node=self._node,
            kubelet=self._gating.kubelet.path,
            policies=policy.documents(),
            rules=rules.policies,
        )

    async def rules(self) -> RulesReport:
        report = await self._gating.policy.report()
        staged = await self._staged.statuses()
        egress = await self._egress.statuses()
        report = msgspec.structs.replace(
            report, policies=[*report.policies, *staged], egress=egress
        )
        if (policies := self._gating.network_policies) is None:
            return report
        pods = [state.pod for state in self._store.states()]
        return msgspec.structs.replace(
            report,
            cluster_network_policies=network_policy_report.statuses(policies, pods),
            problems=[*report.problems, *policies.problems],
        )

    async def drop_events(self, after: int) -> DropEvents:
        return await self._drops.events.after(after)

    async def restart_relay(self) -> str | None:
        try:
            await self._relays.restart()
        except RelayError as error:
            return f"The relay is not restarted: {error}"
        return None

    async def hand_over(self, since_ns: int) -> str | None:
        return self._handover.request(since_ns)

    def _pod_status(self, state: PodState, counts: Mapping[int, Counts]) -> PodStatus:
        pod = state.pod
        tested = state.current_path_test
        return PodStatus(
            namespace=pod.namespace,
            name=pod.name,
            uid=pod.uid,
            mode=pod.mode.label,
            mode_problems=list(pod.mode_problems),
            mode_origin=pod.mode_origin,
            ingress_policies=self._ingress_policies(pod),
            problems=[PodProblem(part=part, text=text) for part, text in self._problems(state)],
            source=pod.source,
            netns=pod.netns_path,
            addresses=list(state.own_addresses),
            unconfirmed={str(address): why for address, why in state.claims.unconfirmed.items()},
            conditions=self._store.conditions.of(pod.uid),
            gates=_gates({i: interface.name for i, interface in state.gates.items()}, counts),
            paths=[
                PathStatus(address=address, result=result.value)
                for address, result in (tested.results if tested else {}).items()
            ],
            existing_flows=self._gating.existing_flows.count(pod.uid),
            probes=self._probing.status(pod.uid, self._answers.of(state)),
            strict_problem="" if pod.host_network else strict_targets.strict_problem(state) or "",
            relayed=self._connections.status(pod.uid),
        )

    def _ingress_policies(self, pod: Pod) -> list[str]:
        policies = self._gating.network_policies
        if policies is None or not policies.policies:
            return []
        return network_policy_report.of_pod(policies, pod)

    def _problems(self, state: PodState) -> Iterator[tuple[str, str]]:
        """By part of the pod, one sentence each: those that its condition may have, too."""
        if state.gate_problem:
            yield "gate-lost" if state.is_gate_lost else "gate", state.gate_problem
        if state.admission and state.admission.problem:
            yield "rules", state.admission.problem
        if state.chain_problem:
            yield "chain", state.chain_problem
        if state.claims.problem:
            yield "addresses", state.claims.problem
        manifest = state.pod.manifest_problem
        if manifest and state.status and state.status.status == TRUE:
            yield "manifest", manifest.message
        for problem in state.pod.host_problems:
            yield "host", problem.message
        for problem in state.pod.annotation_problems:
            yield "annotation", problem.message
        for text in self._probing.certificates.problems(state.pod.uid):
            yield "certificate", text
        yield from self._relay_problem(state)

    def _relay_problem(self, state: PodState) -> Iterator[tuple[str, str]]:
        """Of a pod in strict. With fallback, a relay that an annotation switches off is none."""
        has_fallback = self._relays.has_fallback
        if state.pod.mode is not Mode.STRICT or not state.gates:
            return
        problem = self._relays.pods.problem_for(state)
        if problem and (state.pod.is_relayed or not has_fallback):
            part = "relay" if has_fallback else "relay-without-fallback"
            yield part, isolation.strict_sentence(problem, has_fallback=has_fallback)


def relay_status(
    supervisor: RelaySupervisor,
    connections: ConnectionStats,
    interfaces: Mapping[int, str],
    counts: Mapping[int, Counts],
) -> RelayStatus:
    """interfaces: the relays' interfaces on the host."""
    reports = supervisor.last_reports
    return RelayStatus(
        is_up=supervisor.is_up,
        problem=supervisor.problem,
        restarts=supervisor.restarts,
        connections=sum(report.connections for report in reports),
        held_syns=sum(report.held_syns for report in reports),
        is_bypassed=any(report.is_full for report in reports),
        unknown_address=connections.unknown_address,
        gates=_gates(interfaces, counts),
        has_fallback=supervisor.has_fallback,
    )


def _gates(interfaces: Mapping[int, str], counts: Mapping[int, Counts]) -> list[GateStatus]:
    return [
        GateStatus(interface=name, ifindex=ifindex, packets=labelled(counts.get(ifindex, {})))
        for ifindex, name in interfaces.items()
    ]
