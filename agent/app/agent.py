"""One agent: sources, gates, probes, relay, conditions and endpoints, put together."""

import asyncio
import functools
import gc
from collections.abc import Awaitable, Callable, Iterator

import structlog

from agent import VERSION, tasks
from agent.api.podinfo.disabled import DisabledPodInfo
from agent.api.podinfo.service import PodInfoService
from agent.api.services.metrics import ServiceCollector
from agent.app import component_metrics, network_managers, watchdog
from agent.app.answer_report import AnswerReport
from agent.app.cluster_metrics import ClusterCollector
from agent.app.cluster_outputs import ClusterOutputs
from agent.app.component_metrics import ComponentCollector
from agent.app.drop_reporting import DropReporting
from agent.app.exporter import Exporter
from agent.app.gate_metrics import GateCollector
from agent.app.handover import Handover, Turn
from agent.app.isolation_conditions import IsolationConditions
from agent.app.kernel_metrics import KernelCollector
from agent.app.kubelet_access import KubeletAccess
from agent.app.listeners import Listeners
from agent.app.loop_lag import LoopLag
from agent.app.node_reporter import NodeReporter
from agent.app.readiness import Readiness
from agent.app.reconciler import Reconciler
from agent.app.reports import Reports
from agent.app.servers import Servers
from agent.app.service_outputs import ManifestServices
from agent.cni import installer
from agent.cni.publisher import CniStatePublisher
from agent.default_deny.controller import DefaultDenyController
from agent.gates.address_claims import AddressAuthority
from agent.gates.chain_order import ChainOrder
from agent.gates.crowds import Crowds
from agent.gates.existing_flows import ExistingFlows
from agent.gates.grace_periods import GracePeriods
from agent.gates.heartbeat import Heartbeat
from agent.gates.host_devices import HostDevices
from agent.gates.injectable import InjectableInterfaces
from agent.gates.metrics import GateMetrics
from agent.gates.off_switch import OffSwitch
from agent.gates.path_test import PathTester
from agent.gates.pod_gates import PodGates
from agent.gates.worker import GateWorker
from agent.kube.client import ApiClient
from agent.kube.kubelet_version import KubeletVersion
from agent.kube.node_report import NodeStatus
from agent.linux.cgroups import cgroup2_mount
from agent.linux.link_monitor import LinkMonitor
from agent.linux.pod_network import PodNetworkReader
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.events import PodEvents
from agent.pods.metrics import PodCollector
from agent.pods.object_labels import ObjectLabels
from agent.pods.off_file import OffFile
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.policy.api_callees import ApiCallees
from agent.policy.api_source import ApiPolicies
from agent.policy.controller import PolicyController
from agent.policy.default_rules import API_SERVER, DefaultRules
from agent.policy.metrics import PolicyCollector
from agent.policy.raw_sockets import RawSocketAdmission
from agent.probing.answered_probes import AnsweredProbes
from agent.probing.manager import ProbeManager
from agent.settings import Settings
from agent.sources.cluster import ClusterSource
from agent.sources.manifests import ManifestDirectory
from agent.sources.source import ManifestSource, PodSource
from agent.strict.launcher import ProcessLauncher
from agent.strict.metrics import RelayCollector
from agent.strict.stats import ConnectionStats
from agent.strict.supervisor import RelaySupervisor
from bpf import pins
from bpf.attachment import Attachment
from bpf.replies import ReplyTables
from bpf.rule_hits import RuleHits

log = structlog.get_logger(__name__)


# How often every pod is reconciled without a mark; a pass over one pod is 20 ms of CPU. Netlink
# messages mark pods within milliseconds, and lost messages are reported, so a resync repairs what
# nothing reports, such as filters that another program removes.
_RESYNC_SECONDS = {Attachment.TCX: 300.0, Attachment.CLSACT: 30.0}


class Agent:
    """One agent, for one turn on the node."""

    def __init__(
        self,
        settings: Settings,
        gate_worker: GateWorker,
        api: ApiClient | None,
        listeners: Listeners,
        handover: Handover,
        turn: Turn,
    ) -> None:
        """api: for a node of a cluster; listeners: to be served, and closed by the caller."""
        self._settings = settings
        self._api = api
        self._listeners = listeners
        self._gate_worker = gate_worker
        self._handover = handover
        state = settings.run_directory / "state"
        self._store = PodStore(Conditions())
        self._modes = PodModes(
            settings.mode,
            settings.max_mode,
            own_namespace=settings.namespace,
            state=state / "modes.json",
            is_complete=api is None,
        )
        self._off_file = OffFile(settings.run_directory, self._modes)
        metrics = GateMetrics(self._store)
        events = PodEvents()
        policies = ApiPolicies(api, state=state / "apipolicies.json") if api else None
        self._source: PodSource
        defaults: DefaultRules | None = None
        cluster: ClusterSource | None = None
        self._outputs: ClusterOutputs | None = None
        self._callees: ApiCallees | None = None
        if api and policies:
            cluster = ClusterSource(api, settings, self._store, events, policies, self._modes)
            self._source = cluster
            self._callees = ApiCallees(api, state=state / "callees.json")
            defaults = DefaultRules(
                self._callees, store=self._store, disabled=settings.disabled_default_rules
            )
            self._outputs = ClusterOutputs(api, settings, self._store, cluster, events, metrics)
        else:
            assert settings.manifests is not None  # `startup.run`
            manifests = ManifestDirectory(settings.manifests, self._store, self._modes)
            self._source = ManifestSource(manifests, settings.manifests)
        self._services: ManifestServices | None = None
        if settings.service_endpoints and api is None:
            self._services = ManifestServices(settings, settings.service_endpoints, self._store)
        self._reader = PodNetworkReader()
        self._authority = AddressAuthority(self._store)
        labels = cluster.pods.labels if cluster else ObjectLabels()
        self._policy = PolicyController(
            settings,
            RuleHits(gate_worker.loaded),
            RawSocketAdmission(gate_worker.raw_socket_policy, settings.raw_sockets),
            api=policies,
            store=self._store,
            labels=labels,
            modes=self._modes,
            defaults=defaults,
        )
        self._chain_order = ChainOrder(gate_worker, self._store, metrics)
        self._path_tester = PathTester(gate_worker.path_tests, self._store, metrics)
        self._crowds = Crowds(gate_worker, self._store)
        self._grace_periods = GracePeriods(gate_worker, self._store, self._crowds)
        self._reconciler = Reconciler(
            store=self._store,
            source=self._source,
            gate_worker=gate_worker,
            pod_gates=PodGates(
                store=self._store,
                events=events,
                gate_worker=gate_worker,
                reader=self._reader,
                authority=self._authority,
                admitter=self._policy,
                chain_order=self._chain_order,
                crowds=self._crowds,
                metrics=metrics,
                has_fallback=not settings.strict_without_fallback,
            ),
            grace_periods=self._grace_periods,
            path_tester=self._path_tester,
            resync_seconds=_RESYNC_SECONDS[gate_worker.gates.attachment],
        )
        host_devices = HostDevices(gate_worker, self._store)
        self._injectable = InjectableInterfaces(
            gate_worker, self._store, host_devices, forwarding=settings.forwarding_interfaces
        )
        self._default_deny = DefaultDenyController(
            self._store, self._modes, abandoned_seconds=int(settings.dead_man_hours * 3600)
        )
        self._cni_state = CniStatePublisher(
            settings.run_directory, gate_worker.gates.attachment, self._modes
        )
        cgroup = cgroup2_mount()
        assert cgroup is not None  # `preflight.check`
        self._launcher = ProcessLauncher(
            gate_worker=gate_worker,
            ranges=settings.relay_ranges,
            bpffs=settings.bpffs,
            cgroup=cgroup,
            store=self._store,
            default_deny=self._default_deny,
            injectable=self._injectable,
        )
        connections = ConnectionStats(self._store)
        answered = AnsweredProbes()
        self._relays = RelaySupervisor(
            self._launcher,
            modes=self._modes,
            has_fallback=not settings.strict_without_fallback,
            https_hooks=settings.feature_gates.pod_lifecycle_https,
            store=self._store,
            stats=connections,
            answered=answered,
        )
        self._kubelet = KubeletAccess(
            settings,
            gate_worker,
            store=self._store,
            events=events,
            default_deny=self._default_deny,
            on_changed=self._on_kubelet,
        )
        self._off_switch = OffSwitch(
            gate_worker,
            self._modes,
            self._store,
            host_devices=host_devices,
            on_changed=self._on_switched,
        )
        self._isolation = IsolationConditions(self._store, self._relays, self._kubelet.open_ports)
        self._probing = ProbeManager(
            self._store,
            pins.Pins(settings.bpffs),
            containers=self._source,
            events=events,
            answered=answered,
            state=state / "probes.json",
        )
        answers = AnswerReport(self._store, answered, self._relays.bypassed_because)
        self._existing_flows = ExistingFlows(
            store=self._store,
            kubelet_cgroup=lambda: self._kubelet.cgroup,
            replies=ReplyTables(gate_worker.loaded),
            closes=settings.close_existing_flows,
        )
        self._heartbeat = Heartbeat(
            gate_worker.config, cgroup2=cgroup, dead_man_hours=settings.dead_man_hours
        )
        self._drops = DropReporting(settings, gate_worker, store=self._store, labels=labels)
        self._cni_status = installer.PluginStatus()
        self._loop_lag = LoopLag()
        exporter = Exporter(
            refreshed=(
                GateCollector(self._store, gate_worker),
                KernelCollector(gate_worker.loaded.open_maps, gate_worker.loaded.programs),
                PolicyCollector(self._policy),
            ),
            collectors=(
                PodCollector(self._store),
                metrics,
                self._existing_flows,
                *self._drops.collectors,
                self._probing,
                RelayCollector(self._relays, connections),
                answers,
                *self._kubelet.collectors,
                self._loop_lag,
            ),
        )
        self._reports = Reports(
            store=self._store,
            modes=self._modes,
            source=self._source,
            outputs=self._outputs,
            services=self._services.endpoints if self._services else None,
            gate_worker=gate_worker,
            reconciler=self._reconciler,
            isolation=self._isolation,
            open_ports=self._kubelet.open_ports,
            policy=self._policy,
            relays=self._relays,
            connections=connections,
            probing=self._probing,
            answers=answers,
            existing_flows=self._existing_flows,
            kubelet=self._kubelet.identity,
            kubelet_admission=self._kubelet.admission,
            source_processes=self._drops.source_processes,
            history=self._drops.history,
            node=settings.node_name or "",
            raw_sockets=self._drops.raw_sockets,
            drop_events=self._drops.events,
            metrics=exporter,
            handover=handover,
            remains=self._remains,
        )
        self._readiness = Readiness(
            settings.pod_directory,
            self._reports.unready_reason,
            is_take_over=turn.is_take_over,
        )
        pod_info: PodInfoService | DisabledPodInfo = DisabledPodInfo(settings.run_directory)
        if settings.feature_gates.pod_info_api:
            pod_info = PodInfoService(
                settings.run_directory,
                uids=lambda: self._store.pods,
                pod_of=self._store.pod,
                conditions_of=self._store.conditions.of,
                changes=(self._store.desired, self._store.in_force, self._store.conditions.changes),
                source=cluster.pods if cluster else None,
                synced=self._store.synced,
                unready_because=self._reports.unsynced_reason,
            )
            exporter.add(pod_info)
        self._node_reporter: NodeReporter | None = None
        self._kubelet_version: KubeletVersion | None = None
        if api and cluster and settings.node_name:
            self._kubelet_version = KubeletVersion(
                api,
                settings.node_name,
                needed=answered.needs_user_agent,
                publish=answered.set_user_agent,
            )
            self._node_reporter = NodeReporter(
                api, settings.node_name, status=self._node_status, node_uid=cluster.node_uid
            )
        exporter.add_refreshed(
            ComponentCollector(
                gate_worker,
                component_metrics.checks(
                    gate_worker=gate_worker,
                    default_deny=self._default_deny,
                    relays=self._relays,
                    policy=self._policy,
                    cni_status=self._cni_status if settings.cni_conf_directory else None,
                    cluster=cluster,
                    outputs=self._outputs,
                ),
                unready_reason=self._reports.unready_reason,
                turns=lambda: handover.turns,
            )
        )
        if cluster and self._outputs:
            exporter.add(ClusterCollector(cluster, self._outputs))
        publishes_services = self._services or self._outputs
        if publishes_services and publishes_services.endpoints:
            exporter.add(ServiceCollector(publishes_services.endpoints))
        self._servers = Servers(
            settings,
            listeners,
            reports=self._reports,
            pod_info=pod_info,
            synced=self._store.synced,
            api=api,
            attachment=gate_worker.gates.attachment,
        )

    async def run(self) -> bool:
        """Serve until SIGTERM or SIGINT, or until another agent takes over: whether one does.

        Gates are pinned, so they stay in force. Raises `TakeOverError`.
        """
        self._handover.handle_signals()
        links = LinkMonitor(
            on_link_changed=self._on_link_changed,
            on_address_changed=self._store.mark_namespace,
            on_overrun=self._on_overrun,
        )
        worker = self._gate_worker
        # Before all that acts on new pods, since the modes of these come with the saved state.
        self._modes.restore()
        self._off_file.read()
        self._source.start()
        await self._off_switch.open()
        # Before gates use new maps, in which it is unknown: those that are taken over, and those
        # that podgate-cni attaches.
        await self._kubelet.identity.refresh()
        self._cni_state.open()
        await self._default_deny.open(await worker.run(worker.gates.installed))
        await asyncio.to_thread(network_managers.exclude_relay)
        # Before any gate relies on what was stamped.
        await self._injectable.refresh()
        # Before the gates of a previous agent's relays count as leftovers.
        await self._launcher.check()
        await self._policy.open()
        self._reports.http_address = self._listeners.http_address
        async with asyncio.TaskGroup() as group:
            running = [tasks.start(group, name, run) for name, run in self._tasks(links)]
            await self._handover.wait_for_end(self._readiness.overdue)
            for task in running:
                task.cancel()
        self._readiness.check_take_over()
        # The next turn's objects replace these.
        gc.unfreeze()
        handover = self._handover
        has_handed_over = handover.requested.is_set() and not handover.stopping.is_set()
        gates = sum(len(state.gates) for state in self._store.states())
        log.info(Event.HANDED_OVER if has_handed_over else Event.AGENT_STOPPED, gates=gates)
        return has_handed_over

    def _node_status(self) -> NodeStatus | None:
        policies = self._policy.node_policies()
        return NodeStatus(VERSION, policies) if policies else None

    def _tasks(self, links: LinkMonitor) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """All that runs as long as the agent does, by name."""
        limit = self._settings.watchdog_seconds
        yield "watchdog", functools.partial(watchdog.run, limit, self._reports.unhealthy_reason)
        yield "readiness", self._readiness.run
        yield "heartbeat", self._heartbeat.run
        yield "default-deny", self._default_deny.run
        yield from self._kubelet.tasks()
        yield "netlink", links.run
        yield "reconciler", self._reconciler.run
        yield "crowds", self._crowds.run
        yield "grace-periods", self._grace_periods.run
        yield "isolation", self._isolation.run
        yield "path-tests", self._path_tester.run
        yield "chain-order", self._chain_order.run
        yield "existing-flows", self._existing_flows.run
        yield "probes", self._probing.run
        yield "injectable", self._injectable.run
        yield "pods", self._source.run
        yield "modes", self._modes.run
        yield "off-file", self._off_file.run
        yield "off-switch", self._off_switch.run
        yield "cni-state", self._cni_state.run
        yield from self._drops.tasks()
        yield "loop-lag", self._loop_lag.run
        yield "relays", self._relays.run
        yield "verdicts", self._relays.verdicts.run
        yield from self._servers.tasks()
        if self._outputs:
            yield "outputs", self._outputs.run
        if self._services:
            yield "services", self._services.run
        if self._node_reporter:
            yield "node-report", self._node_reporter.run
        if self._kubelet_version:
            yield "kubelet-version", self._kubelet_version.run
        if self._callees and API_SERVER not in self._settings.disabled_default_rules:
            yield "callees of the API server", self._callees.run
        if self._policy.is_enabled:
            yield "policy", self._policy.run
        if plugin := installer.CniInstaller.of(self._settings):
            yield "cni", functools.partial(installer.run, plugin, self._cni_status)

    def _on_link_changed(self) -> None:
        self._source.hint()
        self._store.mark_pending()
        self._chain_order.hint()
        self._injectable.hint()

    def _on_switched(self) -> None:
        self._injectable.hint()
        # The kernel follows it again.
        self._kubelet.write_again()

    def _on_overrun(self) -> None:
        log.warning(Event.NETLINK_OVERRUN)
        self._store.mark_all()
        self._injectable.hint()

    def _on_kubelet(self) -> None:
        if self._kubelet_version:
            self._kubelet_version.hint()
        self._existing_flows.hint()

    def _remains(self) -> list[str]:
        """What podgate has in force on the node, by kind; nothing once it is off."""
        remains = self._off_switch.remains()
        if self._default_deny.is_installed:
            remains.append("default-deny table")
        if self._relays.is_up:
            remains.append("relay")
        return remains
