"""The gates of a node's pods, and what they depend on: sources, modes, policies, the kubelet."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

import structlog

from agent import state_files
from agent.admin import findings
from agent.app import network_managers
from agent.app.kubelet_access import KubeletAccess
from agent.app.reconciler import Reconciler
from agent.cni import installer
from agent.cni.publisher import CniStatePublisher
from agent.default_deny.controller import DefaultDenyController
from agent.gates.address_claims import AddressAuthority
from agent.gates.chain_order import ChainOrder
from agent.gates.crowds import Crowds
from agent.gates.existing_flows import ExistingFlows
from agent.gates.gate_watch import GateWatch
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
from agent.kubelet.pods_search import PodsSearch
from agent.linux import pods_cgroup
from agent.linux.cgroups import cgroup2_mount
from agent.linux.link_monitor import LinkMonitor
from agent.linux.nft_monitor import NftMonitor
from agent.linux.pod_network import PodNetworkReader
from agent.linux.pods_cgroup import PodsCgroup
from agent.linux.traffic_control import TrafficControlMonitor
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.events import PodEvents
from agent.pods.object_labels import ObjectLabels
from agent.pods.off_marks import OffMarks
from agent.pods.pod_modes import NODE, PodModes
from agent.pods.store import PodStore
from agent.policy.api_callees import ApiCallees
from agent.policy.api_source import ApiPolicies, WatchedPolicies
from agent.policy.controller import PolicyController
from agent.policy.default_rules import API_SERVER, DefaultRules
from agent.policy.egress import HostEgressPolicies
from agent.policy.egress_types import HOST_EGRESS, EgressPolicy
from agent.policy.raw_sockets import RawSocketAdmission
from agent.settings import HostProbeMode, RawSocketMode, Settings
from agent.sources.source import PodSource
from agent.strict.relay_gates import RelayGates
from bpf import pins
from bpf.attachment import Attachment
from bpf.replies import ReplyTables
from bpf.rule_hits import RuleHits

if TYPE_CHECKING:
    from agent.policy.cluster_network_policies.source import ClusterNetworkPolicies
    from agent.sources.cluster import ClusterSource
    from agent.sources.node_source import NodeSource

log = structlog.get_logger(__name__)


# How often every pod is reconciled without a mark; a pass over one pod is 20 ms of CPU. Netlink
# messages mark pods within milliseconds, and lost messages are reported, so a resync repairs what
# nothing reports, such as filters that another program removes.
_RESYNC_SECONDS = {Attachment.TCX: 300.0, Attachment.CLSACT: 30.0}

# A pass over 250 new pods takes 3 s by tcx; a single call times out after 60.
_STUCK_SECONDS = 90


class Gating:
    """Attaches the gates of the pods in `store`, for one turn on the node.

    To be created on the loop. It imports only what the first gates need; `agent.app.pod_services`
    has the rest.
    """

    def __init__(
        self,
        settings: Settings,
        gate_worker: GateWorker,
        api: ApiClient | None,
        on_kubelet: Callable[[], None],
    ) -> None:
        """api: for a node of a cluster; on_kubelet: called when the kubelet may have been found or
        lost."""
        self._on_kubelet_changed = on_kubelet
        self._settings = settings
        self.gate_worker = gate_worker
        state = settings.run_directory / "state"
        self.store = PodStore(Conditions())
        self.modes = PodModes(
            settings.mode,
            settings.max_mode,
            own_namespace=settings.namespace,
            state=state / "modes.json",
            is_complete=api is None,
            pods_decide=api is None,
        )
        self._off_marks = OffMarks(settings.run_directory, pins.Pins(settings.bpffs), self.modes)
        self.metrics = GateMetrics(self.store)
        self.events = PodEvents()
        policies = ApiPolicies(api, state=state / "apipolicies.json") if api else None
        egress: WatchedPolicies[EgressPolicy] | None = None
        self.source: PodSource
        self.node: NodeSource | None = None
        """The source, where pods come from a kubelet and a container runtime."""
        self.cluster: ClusterSource | None = None
        """The source, on a node of a cluster."""
        defaults: DefaultRules | None = None
        self._callees: ApiCallees | None = None
        self.network_policies: ClusterNetworkPolicies | None = None
        """None: they are not read."""
        if api and policies:
            from agent.sources import cluster

            saved = state / "apiegresspolicies.json"
            egress = WatchedPolicies(HOST_EGRESS, api, state=saved)
            self.cluster = cluster.ClusterSource(
                api, settings, self.store, policies, self.modes, egress
            )
            self.source = self.node = self.cluster
            self.network_policies = self.cluster.network_policies
            self._callees = ApiCallees(api, state=state / "callees.json")
            defaults = DefaultRules(
                self._callees, store=self.store, disabled=settings.disabled_default_rules
            )
        elif settings.is_standalone:
            from agent.sources.standalone import StandaloneSource

            self.source = self.node = StandaloneSource(settings, self.store, self.modes)
        else:
            from agent.sources.manifest_source import ManifestSource

            assert settings.manifests is not None  # `startup.run`
            self.source = ManifestSource(settings.manifests, self.store, self.modes)
        self.labels = self.cluster.pods.labels if self.cluster else ObjectLabels()
        self._reader = PodNetworkReader()
        self._authority = AddressAuthority(self.store)
        self._pods_cgroup = PodsCgroup(cgroup2_mount())
        self.policy = PolicyController(
            settings,
            RuleHits(gate_worker.loaded),
            RawSocketAdmission(gate_worker.raw_socket_policy, settings.raw_sockets),
            api=policies,
            store=self.store,
            labels=self.labels,
            modes=self.modes,
            defaults=defaults,
            pods_cgroup=self._pods_cgroup,
        )
        self.egress = HostEgressPolicies(
            settings,
            gate_worker.installation,
            api=egress,
            store=self.store,
            labels=self.labels,
            modes=self.modes,
            has_netns=lambda: bool(gate_worker.config.read().node_netns),
            pods_cgroup=self._pods_cgroup,
        )
        self._chain_order = ChainOrder(gate_worker, self.metrics)
        self.default_deny = DefaultDenyController(
            self.store,
            self.modes,
            lambda ifindexes: gate_worker.run(gate_worker.gates.lost, ifindexes),
            is_off=self._off_marks.are_set,
            pods_read_at=lambda: self.source.read_at,
            request_read=self.source.hint,
            abandoned_seconds=int(settings.dead_man_hours * 3600),
            pods_cgroup=self._pods_cgroup,
        )
        self._path_tester = PathTester(
            gate_worker.path_tests, self.store, self.metrics, self._reader, self.default_deny
        )
        self._nftables = NftMonitor(self.default_deny.hint_deleted)
        self._crowds = Crowds(gate_worker, self.store)
        self._gate_watch = GateWatch(
            gate_worker,
            self.store,
            self.metrics,
            on_put_back=self._path_tester.repeat,
            on_lost=self.default_deny.set_lost,
            is_off=self._off_marks.are_set,
        )
        self._traffic_control = TrafficControlMonitor(self._gate_watch.hint)
        self._grace_periods = GracePeriods(gate_worker, self.store, self._crowds)
        self._reconciler = Reconciler(
            store=self.store,
            source=self.source,
            gate_worker=gate_worker,
            pod_gates=PodGates(
                store=self.store,
                gate_worker=gate_worker,
                reader=self._reader,
                authority=self._authority,
                admitter=self.policy,
                chain_order=self._chain_order,
                crowds=self._crowds,
                metrics=self.metrics,
                has_fallback=not settings.strict_without_fallback,
            ),
            grace_periods=self._grace_periods,
            path_tester=self._path_tester,
            resync_seconds=_RESYNC_SECONDS[gate_worker.gates.attachment],
        )
        self._host_devices = HostDevices(gate_worker, self.store)
        self._injectable = InjectableInterfaces(
            gate_worker, self.store, self._host_devices, forwarding=settings.forwarding_interfaces
        )
        self._cni_state = CniStatePublisher(
            settings.run_directory, gate_worker.gates.attachment, self.modes
        )
        self.cni_status = installer.PluginStatus()
        self.relay_gates = RelayGates(
            gate_worker=gate_worker,
            store=self.store,
            default_deny=self.default_deny,
            injectable=self._injectable,
        )
        self.kubelet = KubeletAccess(
            settings,
            gate_worker,
            store=self.store,
            default_deny=self.default_deny,
            on_changed=self._on_kubelet,
        )
        self.off_switch = OffSwitch(
            gate_worker,
            self.modes,
            self.store,
            host_devices=self._host_devices,
            on_changed=self._on_switched,
        )
        self.existing_flows = ExistingFlows(
            store=self.store,
            node=gate_worker.config.facts,
            replies=ReplyTables(gate_worker.loaded),
            closes=settings.close_existing_flows,
        )
        self._heartbeat = Heartbeat(
            gate_worker.config, self._pods_cgroup, dead_man_hours=settings.dead_man_hours
        )
        self._pods_search = PodsSearch(
            self._pods_cgroup, lambda: self.store.pods, on_found=self.policy.read_cgroups
        )
        self._links = LinkMonitor(
            on_link_changed=self._on_link_changed,
            on_address_changed=self.store.mark_namespace,
            on_overrun=self._on_overrun,
        )

    async def open(self) -> None:
        """Do what precedes any gate; then run `tasks`."""
        worker = self.gate_worker
        # Before all that acts on new pods, since the modes of these come with the saved state.
        self.modes.restore()
        self._off_marks.read()
        self.source.start()
        await self.off_switch.open()
        # Before gates use new maps, in which it is unknown: those that are taken over, and those
        # that podgate-cni attaches.
        await self.kubelet.identity.refresh()
        self._cni_state.open()
        await self.default_deny.open(await worker.run(worker.gates.installed))
        await asyncio.to_thread(network_managers.exclude_relay)
        # Before any gate relies on what was stamped.
        await self._injectable.refresh()
        # Before the gates of a previous agent's relays count as leftovers.
        await self.relay_gates.check()
        await self.policy.open()
        await self.egress.open()

    def tasks(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """What runs as long as the agent does, by name."""
        yield "heartbeat", self._heartbeat.run
        yield "default-deny", self.default_deny.run
        yield from self.kubelet.tasks()
        yield "netlink", self._links.run
        yield "reconciler", self._reconciler.run
        yield "crowds", self._crowds.run
        yield "grace-periods", self._grace_periods.run
        yield "path-tests", self._path_tester.run
        yield "gate-watch", self._gate_watch.run
        yield "nftables", self._nftables.run
        yield "traffic-control", self._traffic_control.run
        yield "existing-flows", self.existing_flows.run
        yield "injectable", self._injectable.run
        yield "device-programs", self._host_devices.run
        yield "pods-cgroup", self._pods_search.run
        yield "pods", self.source.run
        yield "modes", self.modes.run
        yield "off-marks", self._off_marks.run
        yield "state-files", state_files.run
        yield "off-switch", self.off_switch.run
        yield "cni-state", self._cni_state.run
        if self._callees and API_SERVER not in self._settings.disabled_default_rules:
            yield "callees of the API server", self._callees.run
        if self.policy.is_enabled:
            yield "policy", self.policy.run
        yield "host-egress", self.egress.run
        if plugin := installer.CniInstaller.of(self._settings):
            yield "cni", functools.partial(installer.run, plugin, self.cni_status)

    def mark_everything(self) -> None:
        """A component starts again that may have lost what it had taken: all of it may have
        changed. Notifications are hints, so this costs time alone."""
        self.store.mark_all()
        for uid in self.store.removed:
            self.store.to_reconcile.mark(uid)
        uids = set(self.store.pods)
        if self.node:
            uids |= self.node.pods.uids
            for uid in uids:
                self.node.pods.changes.mark(uid)
                self.node.changes.mark(uid)
        for uid in uids:
            self.store.in_force.mark(uid)
            self.store.conditions.changes.mark(uid)
        self.modes.changes.mark(NODE)

    def unhealthy_reason(self) -> str | None:
        """Why this agent should be started again."""
        seconds = self._reconciler.seconds_in_pass()
        if seconds > _STUCK_SECONDS:
            return f"reconcile pass running for {seconds:.0f} s"
        if self.node and self.node.sandboxes.is_stuck:
            return self.node.sandboxes.problem
        return None

    def unready_reason(self) -> str | None:
        """Why the node is not closed as desired: the findings that make it so."""
        found = findings.unready(self.unsynced_reason() or "", self.kubelet.open_ports.problem)
        return " ".join(finding.sentence for finding in found) or None

    def unsynced_reason(self) -> str | None:
        """Why the pods are not all of this node's yet."""
        if reason := self.source.unready_reason:
            return reason
        if not self.store.is_synced:
            return "initial pod sync not finished"
        return None

    @property
    def guards(self) -> set[str]:
        """Those that are configured and have something to guard: keys of
        `agent.app.node_findings.GUARDS`."""
        configured = {
            "hooks": self.gate_worker.is_attached,
            "kubelet_followed": self.gate_worker.is_attached,
            "default_deny": self.default_deny.is_desired,
            "raw_sockets": self._settings.raw_sockets is RawSocketMode.DENY_PODS,
            "host_probes": self._settings.kubelet_host_probes is HostProbeMode.DENY,
            "path_tests": any(state.is_path_tested for state in self.store.states()),
        }
        return {name for name, is_configured in configured.items() if is_configured}

    @property
    def pods_cgroup_problem(self) -> str:
        """Why processes of pods cannot be distinguished from the host's, where a kubelet runs."""
        if self.node is None or not any(state.gates for state in self.store.states()):
            return ""
        return "" if self.gate_worker.config.read().pods_cgroup else pods_cgroup.MISSING

    def _on_link_changed(self) -> None:
        self.source.hint()
        self.store.mark_pending()
        self._injectable.hint()
        self.default_deny.hint_links()

    def _on_switched(self) -> None:
        self._injectable.hint()
        # The kernel follows it again.
        self.kubelet.write_again()

    def _on_overrun(self) -> None:
        log.warning(Event.NETLINK_OVERRUN)
        self.store.mark_all()
        self._injectable.hint()
        self.default_deny.hint_links()

    def _on_kubelet(self) -> None:
        self.existing_flows.hint()
        self._on_kubelet_changed()
