"""What the agent does for pods behind their gates: probes, relays, conditions, reports and APIs.

It is imported once the first gates are attached, since importing it takes 0.15 s.
"""

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from agent import VERSION, tasks
from agent.api.podinfo.service import PodInfoService
from agent.app import component_metrics
from agent.app.answer_report import AnswerReport
from agent.app.component_metrics import ComponentCollector
from agent.app.drop_reporting import DropReporting
from agent.app.exporter import Exporter
from agent.app.gate_metrics import GateCollector
from agent.app.gating import Gating
from agent.app.handover import Handover
from agent.app.isolation_conditions import IsolationConditions
from agent.app.kernel_metrics import KernelCollector
from agent.app.loop_lag import LoopLag
from agent.app.node_findings import NodeFindings
from agent.app.ports import Ports
from agent.app.reports import Reports
from agent.app.rings import Rings
from agent.app.servers import Servers
from agent.kube.client import ApiClient
from agent.kube.node_report import NodeStatus
from agent.linux.cgroups import cgroup2_mount
from agent.pods.metrics import PodCollector
from agent.policy.cluster_network_policies.metrics import ClusterNetworkPolicyCollector
from agent.policy.egress_report import HostEgressReport
from agent.policy.metrics import PolicyCollector
from agent.policy.staged import StagedPolicies
from agent.probing.answered_probes import AnsweredProbes
from agent.probing.certificates import ProbeCertificates
from agent.probing.manager import ProbeManager
from agent.settings import FlowSettings, PolicyReadyMode, Settings
from agent.strict.inner_ways import InnerWayWatch
from agent.strict.launcher import ProcessLauncher
from agent.strict.metrics import RelayCollector
from agent.strict.stats import ConnectionStats
from agent.strict.supervisor import RelaySupervisor
from bpf import pins

if TYPE_CHECKING:
    # Imported only where they are configured (`import_optional`).
    from agent.api.conditions.service import ConditionsService
    from agent.api.podinfo.disabled import DisabledPodInfo
    from agent.app.cluster_outputs import ClusterOutputs
    from agent.app.drop_notices import DropNotices
    from agent.app.flow_reporting import FlowReporting
    from agent.app.node_reporter import NodeReporter
    from agent.app.roll_out import RollOut
    from agent.app.service_outputs import ManifestServices
    from agent.kube.kubelet_version import KubeletVersion
    from agent.network_policy.readiness import PolicyReadiness
    from agent.sources.cluster import ClusterSource

_OF_CLUSTERS = (
    *("agent.app.cluster_metrics", "agent.app.cluster_outputs", "agent.app.drop_notices"),
    *("agent.app.node_reporter", "agent.app.roll_out", "agent.kube.kubelet_version"),
    *("agent.network_policy.readiness", "agent.network_policy.source"),
)
_OF_SERVICES = ("agent.app.service_outputs", "agent.services.api.metrics")
_OF_CONDITIONS = "agent.api.conditions.service"
_OF_FLOWS = "agent.app.flow_reporting"
OPTIONAL = (*_OF_CLUSTERS, *_OF_SERVICES, _OF_CONDITIONS, _OF_FLOWS)
"""Modules that only some agents import; all others come with this one."""


def import_optional(settings: Settings) -> None:
    """Import what these settings need and others do not: some 5 MB. For a thread."""
    modules: list[str] = []
    if settings.node_name:
        modules += _OF_CLUSTERS
    if settings.service_endpoints:
        modules += _OF_SERVICES
    if settings.condition_owners:
        modules.append(_OF_CONDITIONS)
    if not settings.feature_gates.pod_info_api:
        modules.append("agent.api.podinfo.disabled")
    if settings.flows:
        modules.append(_OF_FLOWS)
    for module in modules:
        importlib.import_module(module)


class PodServices:
    """All of it, for one turn on the node. To be created on the loop."""

    def __init__(
        self,
        settings: Settings,
        gating: Gating,
        api: ApiClient | None,
        handover: Handover,
        rings: Rings,
        unready_reason: Callable[[], str | None],
    ) -> None:
        """api: for a node of a cluster; unready_reason: None while the agent is ready."""
        self._gating = gating
        ports = Ports(settings)
        store, gate_worker = gating.store, gating.gate_worker
        node, cluster = gating.node, gating.cluster
        self._conditions: ConditionsService | None = None
        if source := settings.condition_owners:
            from agent.api.conditions import service as conditions

            self._conditions = conditions.ConditionsService(
                settings.run_directory,
                api=api,
                files=None if source == "api" else source,
                store=store,
                pods=node.pods if node else None,
                sandbox_of=self._sandbox_of,
                sandbox_changes=node.sandboxes.changes if node else None,
                unready_because=gating.unsynced_reason,
            )
        self._outputs: ClusterOutputs | None = None
        if api and cluster:
            from agent.app import cluster_outputs

            self._outputs = cluster_outputs.ClusterOutputs(
                *(api, settings, store, cluster, gating.events, gating.metrics),
                others=self._conditions,
            )
        self._manifest_services: ManifestServices | None = None
        if settings.service_endpoints and api is None:
            from agent.app import service_outputs

            self._manifest_services = service_outputs.ManifestServices(
                settings, settings.service_endpoints, store
            )
        connections = ConnectionStats(store)
        answered = AnsweredProbes()
        cgroup = cgroup2_mount()
        assert cgroup is not None  # `preflight.check`
        launcher = ProcessLauncher(
            settings.relay_ranges,
            bpffs=settings.bpffs,
            cgroup=cgroup,
            gates=gating.relay_gates,
            orphan_seconds=_orphan_seconds(settings),
        )
        self._relays = RelaySupervisor(
            launcher,
            modes=gating.modes,
            has_fallback=not settings.strict_without_fallback,
            https_hooks=settings.feature_gates.pod_lifecycle_https,
            store=store,
            stats=connections,
            answered=answered,
        )
        self._isolation = IsolationConditions(store, self._relays, gating.kubelet.open_ports)
        certificates = ProbeCertificates(settings.probe_certificates_directory, api)
        self._probing = ProbeManager(
            store,
            pins.Pins(settings.bpffs),
            containers=gating.source,
            events=gating.events,
            answered=answered,
            state=settings.run_directory / "state" / "probes.json",
            passing_since=self._outputs.passing_since if self._outputs else None,
            connect_every=settings.probe_connect_every,
            certificates=certificates,
        )
        self._inner_ways = InnerWayWatch(
            store,
            has_need=self._relays.pods.need_for,
            probed=self._probing.acceptors.ways,
        )
        answers = AnswerReport(store, answered, self._relays.pods.problem_for)
        self._drops = DropReporting(settings, gate_worker, store=store, labels=gating.labels)
        staged = StagedPolicies(
            gating.policy, self._drops.history.observations, store=store, labels=gating.labels
        )
        egress = HostEgressReport(gating.egress, self._drops.source_processes)
        self._drop_notices: DropNotices | None = None
        if api and cluster:
            from agent.app import drop_notices

            self._drop_notices = drop_notices.DropNotices(
                *(self._drops.source_processes, gating.events), store=store, labels=gating.labels
            )
        self._flows: FlowReporting | None = None
        if settings.flows:
            self._flows = _flow_reporting(settings, settings.flows, gating, self._drops)
        self._policy_readiness: PolicyReadiness | None = None
        if api and cluster and self._outputs:
            self._policy_readiness = _policy_readiness(
                settings, gating, api, cluster, self._outputs
            )
        self._loop_lag = LoopLag()
        checks = component_metrics.checks(
            gate_worker=gate_worker,
            default_deny=gating.default_deny,
            relays=self._relays,
            policy=gating.policy,
            cni_status=gating.cni_status if settings.cni_conf_directory else None,
            node=node,
            outputs=self._outputs,
            ports=ports,
        )
        exporter = Exporter(
            refreshed=(
                GateCollector(store, gate_worker),
                KernelCollector(gate_worker.loaded.open_maps, gate_worker.loaded.programs),
                PolicyCollector(gating.policy),
                staged,
                egress,
                ComponentCollector(
                    gate_worker,
                    checks,
                    unready_reason=unready_reason,
                    turns=lambda: handover.turns,
                ),
            ),
            collectors=(
                PodCollector(store),
                gating.metrics,
                gating.existing_flows,
                *self._drops.collectors,
                self._probing,
                RelayCollector(self._relays, connections),
                answers,
                *gating.kubelet.collectors,
                rings,
                self._loop_lag,
            ),
            level=settings.metrics_level,
        )
        if self._conditions:
            exporter.add(self._conditions)
        if self._flows:
            exporter.add(self._flows.outlet)
        if self._policy_readiness:
            exporter.add(self._policy_readiness)
        if cluster and self._outputs:
            from agent.app.cluster_metrics import ClusterCollector

            exporter.add(ClusterCollector(cluster, self._outputs))
        if gating.network_policies:
            exporter.add(ClusterNetworkPolicyCollector(gating.network_policies, store))
        if node:
            exporter.add(node)
            if node.nri:
                exporter.add(node.nri)
                node.nri.set_correction(self._correct_conditions)
        publishes_services = self._manifest_services or self._outputs
        if publishes_services and publishes_services.endpoints:
            from agent.services.api.metrics import ServiceCollector

            exporter.add(ServiceCollector(publishes_services.endpoints))
        pod_info: PodInfoService | DisabledPodInfo
        if settings.feature_gates.pod_info_api:
            pod_info = PodInfoService(
                settings.run_directory,
                uids=lambda: store.pods,
                pod_of=store.pod,
                conditions_of=store.conditions.of,
                addresses_of=store.own_addresses,
                changes=(store.desired, store.in_force, store.conditions.changes),
                source=node.pods if node else None,
                synced=store.synced,
                unready_because=gating.unsynced_reason,
            )
            exporter.add(pod_info)
        else:
            from agent.api.podinfo import disabled

            pod_info = disabled.DisabledPodInfo(settings.run_directory)
        self._kubelet_version: KubeletVersion | None = None
        self._node_reporter: NodeReporter | None = None
        self._roll_out: RollOut | None = None
        if api and cluster and settings.node_name:
            from agent.app import node_reporter
            from agent.kube import kubelet_version

            self._kubelet_version = kubelet_version.KubeletVersion(
                api,
                settings.node_name,
                needed=answered.needs_user_agent,
                publish=answered.set_user_agent,
            )
            self._node_reporter = node_reporter.NodeReporter(
                api, settings.node_name, status=self._node_status, node_uid=cluster.node_uid
            )
            if settings.pod_name:
                from agent.app import roll_out

                watched = cluster.pods.pods
                self._roll_out = roll_out.RollOut(
                    api,
                    lambda: watched.objects.values(),
                    namespace=settings.namespace,
                    name=settings.pod_name,
                )
        manifest_services = self._manifest_services
        reports = Reports(
            gating,
            unready_reason=unready_reason,
            outputs=self._outputs,
            services=manifest_services.endpoints if manifest_services else None,
            isolation=self._isolation,
            relays=self._relays,
            connections=connections,
            probing=self._probing,
            answers=answers,
            drops=self._drops,
            staged=staged,
            egress=egress,
            node=settings.node_name or "",
            ports=ports,
            metrics=exporter,
            handover=handover,
            checks=checks,
            component_problems=rings.problems,
            conditions=self._conditions,
            flow_problem=self._flows.outlet.problem if self._flows else lambda: "",
        )
        self._reports = reports
        self._findings = NodeFindings(
            reports.findings, gating.events, store, guards=lambda: gating.guards
        )
        exporter.add_refreshed(self._findings)
        self._servers = Servers(
            settings,
            ports,
            reports=reports,
            pod_info=pod_info,
            api=api,
            attachment=gate_worker.gates.attachment,
        )
        # What these subscribed to has changed before.
        for uid in store.pods:
            store.in_force.mark(uid)

    async def run(self) -> None:
        """Run all of it until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name, run in self._tasks():
                tasks.start(group, name, run)

    def on_kubelet(self) -> None:
        """The kubelet may have been found or lost."""
        self._findings.hint()
        if self._kubelet_version:
            self._kubelet_version.hint()

    def _tasks(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        yield "isolation", self._isolation.run
        yield "probes", self._probing.run
        yield from self._drops.tasks()
        if self._drop_notices:
            yield "drop-notices", self._drop_notices.run
        if self._flows:
            yield "flows", self._flows.run
        yield "loop-lag", self._loop_lag.run
        yield "findings", self._findings.run
        yield "inner-ways", self._inner_ways.run
        yield "relays", self._relays.run
        yield "verdicts", self._relays.verdicts.run
        yield "probe certificates", self._probing.certificates.run
        yield from self._servers.tasks()
        if self._conditions:
            yield "conditions", self._conditions.run
        if self._policy_readiness:
            yield "policy-ready", self._policy_readiness.run
        if self._outputs:
            yield "outputs", self._outputs.run
        if self._manifest_services:
            yield "services", self._manifest_services.run
        if self._node_reporter:
            yield "node-report", self._node_reporter.run
        if self._roll_out:
            yield "roll-out", self._roll_out.run
        if self._kubelet_version:
            yield "kubelet-version", self._kubelet_version.run

    async def _correct_conditions(self, uid: str | None) -> None:
        """Conditions from before a reboot must not make a pod Ready whose containers start now.
        None: of all pods of which no container runs."""
        node, outputs = self._gating.node, self._outputs
        assert node is not None  # NRI calls where there is a runtime.
        self._isolation.publish()
        if outputs is None:
            return
        if uid is not None:
            # Without a task: most pods have no such condition, and the runtime waits.
            await outputs.writer.correct(uid)
            return
        sandboxes = node.sandboxes
        uids = [one for one in sandboxes.current if not sandboxes.containers.get(one)]
        async with asyncio.TaskGroup() as group:
            for one in uids:
                group.create_task(outputs.writer.correct(one), name="correction of conditions")

    def _sandbox_of(self, uid: str) -> str:
        """The name of a pod's sandbox, or of its network namespace without a runtime; empty if it
        is not known."""
        if node := self._gating.node:
            sandbox = node.sandboxes.current.get(uid)
            return sandbox.short_id if sandbox else ""
        pod = self._gating.store.pod(uid)
        return (pod and pod.netns_path) or ""

    def _node_status(self) -> NodeStatus | None:
        policies = self._gating.policy.node_policies()
        egress = self._gating.egress.node_policies()
        return NodeStatus(VERSION, policies, self._reports.summary, egress) if policies else None


def _flow_reporting(
    settings: Settings, flows: FlowSettings, gating: Gating, drops: DropReporting
) -> "FlowReporting":
    from agent.app import flow_reporting

    return flow_reporting.FlowReporting(
        flows,
        node=settings.node_name or "",
        counts=gating.gate_worker.gates.counts,
        history=drops.history,
        events=drops.events,
        processes=drops.source_processes,
        admissions=gating.policy.samples,
    )


def _policy_readiness(
    settings: Settings,
    gating: Gating,
    api: ApiClient,
    cluster: "ClusterSource",
    outputs: "ClusterOutputs",
) -> "PolicyReadiness":
    from agent.network_policy import readiness
    from agent.network_policy import source as network_policies

    state = settings.run_directory / "state"
    policies = None
    if settings.policy_ready.mode is not PolicyReadyMode.OFF:
        policies = network_policies.NetworkPolicies(api, state=state / "networkpolicies.json")
        cluster.report_watchers(policies.watchers)
    return readiness.PolicyReadiness(
        settings.policy_ready,
        policies,
        store=gating.store,
        object_labels=gating.labels,
        namespace=settings.namespace,
        state=state / "policyready.json",
        reported=outputs.policy_ready,
    )


def _orphan_seconds(settings: Settings) -> float:
    """Not beyond the dead man's time: after it the gate of the relay's interface is open, too, and
    the relay would proxy what others send to it past the pod's own rules."""
    dead_man_seconds = settings.dead_man_hours * 3600
    return min(settings.orphan_relay_seconds, dead_man_seconds or settings.orphan_relay_seconds)
