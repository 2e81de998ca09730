"""The responses of the agent's HTTP servers: metrics, status, drops, rules and health."""

import asyncio
import datetime
import os
from collections.abc import Callable, Iterable, Mapping

import msgspec

from agent import VERSION
from agent.admin.observations import Observations
from agent.admin.report import (
    AgentReport,
    DropEvents,
    Drops,
    GateStatus,
    HookStatus,
    PathStatus,
    PodSourceStatus,
    PodStatus,
    RelayStatus,
    RulesReport,
    SourceProcessStatus,
)
from agent.api.services.source import ServiceEndpoints
from agent.app import service_outputs
from agent.app.answer_report import AnswerReport
from agent.app.cluster_outputs import ClusterOutputs
from agent.app.exporter import Exporter
from agent.app.handover import Handover
from agent.app.isolation_conditions import IsolationConditions
from agent.app.open_ports import OpenPorts
from agent.app.reconciler import Reconciler
from agent.drops.events import DropEventLog
from agent.drops.history import SourceHistory
from agent.drops.raw_sockets import RawSocketSources
from agent.drops.source_processes import CgroupName, SourceProcesses, protocol_word, wall_clock
from agent.gates.existing_flows import ExistingFlows
from agent.gates.worker import GateWorker
from agent.kubelet.admission import KubeletAdmission
from agent.kubelet.identity import KubeletIdentity
from agent.pods.pod_modes import PodModes
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.policy.controller import PolicyController
from agent.probing.manager import ProbeManager
from agent.sources.source import PodSource
from agent.strict.process import RelayError
from agent.strict.stats import ConnectionStats
from agent.strict.supervisor import RelaySupervisor
from bpf import sources as bpf_sources
from bpf.counters import labelled
from bpf.drop_sources import DropSource
from bpf.gates import Counts

# A pass over 250 new pods takes 3 s by tcx; a single call times out after 60.
_STUCK_SECONDS = 90


class Reports:
    """Makes the content of the agent's HTTP responses."""

    def __init__(
        self,
        *,
        store: PodStore,
        modes: PodModes,
        source: PodSource,
        outputs: ClusterOutputs | None,
        services: ServiceEndpoints | None,
        gate_worker: GateWorker,
        reconciler: Reconciler,
        isolation: IsolationConditions,
        open_ports: OpenPorts,
        policy: PolicyController,
        relays: RelaySupervisor,
        connections: ConnectionStats,
        probing: ProbeManager,
        answers: AnswerReport,
        existing_flows: ExistingFlows,
        kubelet: KubeletIdentity,
        kubelet_admission: KubeletAdmission,
        source_processes: SourceProcesses,
        history: SourceHistory,
        node: str,
        raw_sockets: RawSocketSources,
        drop_events: DropEventLog,
        metrics: Exporter,
        handover: Handover,
        remains: Callable[[], list[str]],
    ) -> None:
        """services: of a node without a cluster; node: its name, empty without a cluster."""
        self.http_address = ""
        self._started = datetime.datetime.now(datetime.UTC)
        self._store = store
        self._modes = modes
        self._source = source
        self._outputs = outputs
        self._services = services
        self._gate_worker = gate_worker
        self._reconciler = reconciler
        self._isolation = isolation
        self._open_ports = open_ports
        self._policy = policy
        self._relays = relays
        self._connections = connections
        self._probing = probing
        self._answers = answers
        self._existing_flows = existing_flows
        self._kubelet = kubelet
        self._kubelet_admission = kubelet_admission
        self._source_processes = source_processes
        self._history = history
        self._node = node
        self._raw_sockets = raw_sockets
        self._drop_events = drop_events
        self._metrics = metrics
        self._handover = handover
        self._remains = remains

    def unhealthy_reason(self) -> str | None:
        seconds = self._reconciler.seconds_in_pass()
        if seconds > _STUCK_SECONDS:
            return f"reconcile pass running for {seconds:.0f} s"
        return None

    def unready_reason(self) -> str | None:
        return self.unsynced_reason() or self._open_ports.problem or None

    def unsynced_reason(self) -> str | None:
        """Why the pods are not all of this node's yet."""
        if reason := self._source.unready_reason:
            return reason
        if not self._store.is_synced:
            return "initial pod sync not finished"
        return None

    async def metrics(self) -> bytes:
        return await self._metrics.render()

    async def report(self) -> AgentReport:
        counts = await self._gate_worker.counts()
        node_drops = await self._gate_worker.host_drops()
        raw_sockets = await self._raw_sockets.report()
        # Nothing below waits, so that states and the conditions that follow from them agree.
        self._isolation.publish()
        states = sorted(self._store.states(), key=lambda state: state.pod.full_name)
        loaded = self._gate_worker.loaded
        return AgentReport(
            version=VERSION,
            pid=os.getpid(),
            started=self._started,
            source_hash=bpf_sources.fingerprint(),
            attachment=self._gate_worker.gates.attachment.value,
            programs=loaded.outcome.origin.value,
            load_ms=loaded.outcome.seconds * 1000,
            is_synced=self._store.is_synced,
            kubelet=self._kubelet.current.path if self._kubelet.current else None,
            kubelet_problem=self._kubelet.problem,
            kubelet_unfollowed=self._kubelet_admission.problem,
            open_ports=self._open_ports.problem,
            http_address=self.http_address,
            default_mode=self._modes.node.default.label,
            max_mode=self._modes.node.ceiling.label,
            max_mode_from=self._modes.node.ceiling_from,
            in_force=self._remains(),
            hooks=[
                HookStatus(name=hook.name, problem=hook.problem)
                for hook in self._gate_worker.hook_states
            ],
            pod_source=self._pod_source(),
            node_drops=node_drops,
            raw_sockets=raw_sockets,
            relay=relay_status(self._relays, self._connections, self._store.relay_gates, counts),
            pods=[self._pod_status(state, counts) for state in states],
        )

    def _pod_source(self) -> PodSourceStatus:
        found = (self._outputs or self._source).status()
        problems = service_outputs.problems(self._services) + found.problems
        return msgspec.structs.replace(found, problems=problems)

    async def drops(self) -> Drops:
        seen = await asyncio.to_thread(self._source_processes.read)
        report = drops_report(seen, self._store, lost_packets=self._source_processes.lost())
        raw_sockets = await self._raw_sockets.report()
        return msgspec.structs.replace(report, raw_sockets=raw_sockets.sources)

    async def observations(self) -> Observations:
        seen = await asyncio.to_thread(self._history.observations)
        rules = await self._policy.report()
        return msgspec.structs.replace(
            seen,
            node=self._node,
            kubelet=self._kubelet.current.path if self._kubelet.current else None,
            policies=self._policy.documents(),
            rules=rules.policies,
        )

    async def rules(self) -> RulesReport:
        return await self._policy.report()

    async def drop_events(self, after: int) -> DropEvents:
        return await self._drop_events.after(after)

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
            mode_problems=[problem.message for problem in pod.mode_problems],
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
            existing_flows=self._existing_flows.count(pod.uid),
            probes=self._probing.status(pod.uid, self._answers.of(state)),
            relayed=self._connections.status(pod.uid),
        )


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


def drops_report(
    sources: Iterable[tuple[DropSource, CgroupName]], store: PodStore, *, lost_packets: int
) -> Drops:
    return Drops(
        sources=[
            SourceProcessStatus(
                namespace=pod.namespace,
                pod=pod.name,
                mode=pod.mode.label,
                protocol=protocol_word(seen.protocol),
                port=seen.port,
                has_many_ports=seen.has_many_ports,
                cgroup=cgroup.path,
                source_pod=cgroup.pod_name,
                process=seen.process_name,
                packets=seen.count,
                first=wall_clock(seen.first_ns),
                last=wall_clock(seen.last_ns),
                labels=pod.labels,
            )
            for seen, cgroup in sources
            if (pod := store.pod_of_interface(seen.ifindex))
        ],
        lost_packets=lost_packets,
    )


def _gates(interfaces: Mapping[int, str], counts: Mapping[int, Counts]) -> list[GateStatus]:
    return [
        GateStatus(interface=name, ifindex=ifindex, packets=labelled(counts.get(ifindex, {})))
        for ifindex, name in interfaces.items()
    ]
