"""One agent: sources, gates, probes, relay, conditions and endpoints, put together."""

import asyncio
import datetime
import functools
import gc
import os
import signal

import structlog

from agent import VERSION, tasks
from agent.admin.report import Drops, HookStatus, Refusals, Report, Rules
from agent.api.podinfo.endpoint import PodInfo
from agent.app import handover, http_server, network_managers
from agent.app.reconciler import Reconciler
from agent.app.reports import RELAY, drops_of, pod_status, relay_status
from agent.cni import installer
from agent.default_deny.controller import DefaultDenyController
from agent.drops.events import DropEventLog
from agent.drops.source_processes import SourceProcesses
from agent.gates.address_claims import AddressAuthority
from agent.gates.existing_flows import ExistingFlows
from agent.gates.heartbeat import Heartbeat
from agent.gates.host_devices import HostDevices
from agent.gates.injectable import InjectableInterfaces
from agent.gates.worker import GateWorker
from agent.kube.client import ApiClient
from agent.kubelet.admitted_ports import pods_cgroup
from agent.kubelet.identity import KubeletIdentity
from agent.kubelet.search import KubeletCgroup
from agent.linux.cgroups import cgroup2_mount
from agent.linux.link_monitor import LinkWatch
from agent.linux.pod_network import NetworkReader
from agent.metrics import GateSample, Metrics
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.policy.api_source import ApiPolicies
from agent.policy.controller import PolicyController
from agent.probing.manager import ProbeManager
from agent.relay import messages
from agent.settings import Settings
from agent.sources.cluster import Cluster
from agent.sources.cluster_metrics import ClusterCollector
from agent.sources.manifests import ManifestSource
from agent.sources.source import ManifestFeed, PodFeed
from agent.strict.launcher import Launcher
from agent.strict.metrics import RelayCollector
from agent.strict.process import RelayError
from agent.strict.stats import ConnectionStats
from agent.strict.supervisor import Relaying
from bpf import pins, sources
from bpf.drop_sources import DropSources
from bpf.gates import Attachment
from bpf.replies import ReplyTables
from bpf.rule_hits import RuleHits
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)


# How often every pod is looked at without a hint; a look is 20 ms of CPU. Netlink hints come within
# milliseconds, and lost ones are told of, so this is for what nobody foresaw. But filters that are
# taken away are only seen by it.
_RESYNC_SECONDS = {Attachment.TCX: 300.0, Attachment.CLSACT: 30.0}
# A pass over 250 new pods takes 3 s by tcx; a single call is given up after 60.
_STUCK_SECONDS = 90


class Agent:
    """One running agent. `run` returns when the process is told to end."""

    def __init__(self, settings: Settings, gate_worker: GateWorker, api: ApiClient | None) -> None:
        """api: for a node of a cluster."""
        self._settings = settings
        self._gate_worker = gate_worker
        self._started = datetime.datetime.now(datetime.UTC)
        self._conditions = Conditions(on_change=self._on_condition)
        self._metrics = Metrics(self._conditions)
        self._metrics.describe_agent(
            source_hash=sources.fingerprint(),
            attachment=gate_worker.attachment.value,
            was_compiled=gate_worker.loaded.was_compiled,
            load_seconds=gate_worker.loaded.load_ms / 1000,
        )
        self._reader = NetworkReader()
        self._authority = AddressAuthority(self._metrics)
        self._probing = ProbeManager(
            self._conditions,
            self._metrics,
            pins.Pins(settings.bpffs),
            run_of=lambda uid: self._feed.run_of(uid),
            on_outcome=lambda pod, key, outcome: self._feed.probed(pod, key, outcome),
            state=settings.run_directory / "state" / "probes.json",
        )
        policies = None
        if api:
            state = settings.run_directory / "state" / "apipolicies.json"
            policies = ApiPolicies(api, state=state)
        self._host_access = PolicyController(
            settings,
            RuleHits(gate_worker.loaded),
            api=policies,
            guarded=lambda: self._reconciler.guarded.values(),
            on_change=lambda uid: self._reconciler.mark(uid),
            is_settled=lambda: self._reconciler.is_settled(),
        )
        self._reconciler = Reconciler(
            gate_worker=gate_worker,
            reader=self._reader,
            conditions=self._conditions,
            probing=self._probing,
            metrics=self._metrics,
            resync_seconds=_RESYNC_SECONDS[gate_worker.attachment],
            admit=self._host_access.admit,
            on_gated=self._on_gated,
            on_change=self._on_pods,
            why_not_strict=lambda guarded: self._relaying.why_not(guarded),
            other_gates=lambda: self._launcher.interfaces,
            unready_because=lambda: self._feed.unready_because,
            on_first_gate=lambda pod: self._feed.gated(pod),
            on_gate_lost=lambda pod, problem: self._feed.gate_lost(pod, problem),
            on_unconfirmed_address=lambda pod, problem: self._feed.unconfirmed_address(
                pod, problem
            ),
            authority=self._authority,
        )
        cgroup = cgroup2_mount()
        assert cgroup is not None  # `preflight.check`
        self._launcher = Launcher(
            gate_worker=gate_worker,
            ranges=settings.relay_ranges,
            bpffs=settings.bpffs,
            cgroup=cgroup,
            on_gated=self._on_gated,
        )
        self._relaying = Relaying(
            self._launcher,
            is_default=settings.mode is Mode.STRICT,
            guarded=lambda: self._reconciler.guarded.values(),
            on_report=self._on_relay_report,
            on_change=self._reconciler.publish,
        )
        self._connection_stats = ConnectionStats(self._pod)
        self._metrics.registry.register(RelayCollector(self._relaying, self._connection_stats))
        self._feed = self._feed_of(settings, api, policies)
        self._pod_info = PodInfo(
            settings.run_directory,
            pods=lambda: (guarded.pod for guarded in self._reconciler.guarded.values()),
            conditions_of=self._conditions.of,
            source=self._feed.pods if isinstance(self._feed, Cluster) else None,
            unready_because=self.unready_because,
        )
        crossings = HostDevices(
            gate_worker, gated=self._gated, is_synced=lambda: self._reconciler.is_synced
        )
        self._origins = InjectableInterfaces(gate_worker, on_links=crossings.keep)
        self._older_flows = ExistingFlows(
            guarded=lambda: self._reconciler.guarded.values(),
            kubelet_cgroup=lambda: gate_worker.config.read().kubelet_cgroup,
            replies=ReplyTables(gate_worker.loaded),
            metrics=self._metrics,
            ends=settings.close_existing_flows,
        )
        self._heartbeat = Heartbeat(gate_worker.config, dead_man_hours=settings.dead_man_hours)
        self._kubelet = KubeletIdentity(settings.kubelet, self._on_kubelet)
        self._callers = SourceProcesses(
            DropSources(gate_worker.loaded),
            state=settings.run_directory / "state" / "callers.json",
            live_ifindexes=self._live_ifindexes,
        )
        self._refusals = DropEventLog(
            gate_worker.events, callers=self._callers, pod_of=self._pod_of
        )
        self._born_closed: DefaultDenyController | None = None
        self._http_address = ""

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Gates stay: they are pinned, and go on judging."""
        settings = self._settings
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        watch = LinkWatch(
            on_node_change=self._on_node_change,
            on_pod_change=self._reconciler.mark_namespace,
            on_overrun=self._on_overrun,
        )
        self._born_closed = await DefaultDenyController.open(
            settings,
            await self._gate_worker.installed(),
            claimed=lambda: (
                self._launcher.interfaces.keys()
                | {
                    ifindex
                    for guarded in self._reconciler.guarded.values()
                    for ifindex in guarded.interface_indexes
                }
            ),
        )
        await asyncio.to_thread(network_managers.keep_off)
        # Before anybody takes the gates of an earlier agent's relays for leftovers.
        await self._launcher.look()
        await self._host_access.open()
        self._feed.start()
        # What stands now stays; a full collection of it would hold up the loop for 20 ms.
        gc.collect()
        gc.freeze()
        async with (
            http_server.serve_http(
                self, settings.http_host, settings.http_port
            ) as self._http_address,
            http_server.serve_admin(self, settings.admin_socket),
        ):
            log.info(
                "agent started",
                version=VERSION,
                pid=os.getpid(),
                http=self._http_address,
                attachment=self._gate_worker.attachment.value,
                compiled=self._gate_worker.loaded.was_compiled,
                load_ms=round(self._gate_worker.loaded.load_ms, 1),
            )
            handover.tell_start(settings.started_file)
            # Before a gate is taken over by maps that are new: they do not know the kubelet yet.
            await self._kubelet.refresh()
            async with asyncio.TaskGroup() as group:
                running = [
                    tasks.start(group, "heartbeat", self._heartbeat.run),
                    tasks.start(group, "backstop", self._born_closed.run),
                    tasks.start(group, "kubelet", self._kubelet.run),
                    tasks.start(group, "netlink", watch.run),
                    tasks.start(group, "reconciler", self._reconciler.run),
                    tasks.start(group, "self-tests", self._reconciler.self_test.run),
                    tasks.start(group, "places", self._reconciler.places.run),
                    tasks.start(group, "older-flows", self._older_flows.run),
                    tasks.start(group, "probes", self._probing.run),
                    tasks.start(group, "origins", self._origins.run),
                    tasks.start(group, "pods", self._feed.run),
                    tasks.start(group, "callers", self._callers.run),
                    tasks.start(group, "refusals", self._refusals.run),
                    tasks.start(group, "relay", self._relaying.run),
                ]
                if settings.feature_gates.pod_info_api:
                    self._metrics.registry.register(self._pod_info)
                    running.append(tasks.start(group, "podinfo", self._pod_info.run))
                if self._host_access.is_enabled:
                    running.append(tasks.start(group, "rules", self._host_access.run))
                if kept := installer.CniInstaller.of(settings):
                    running.append(
                        tasks.start(group, "cni", functools.partial(installer.keep, kept))
                    )
                await stop.wait()
                for task in running:
                    task.cancel()
        log.info("agent stopped; gates stay in force", gates=self._gate_count())

    def close(self) -> None:
        self._reader.close()
        self._authority.close()

    def unhealthy_because(self) -> str | None:
        seconds = self._reconciler.seconds_in_pass()
        if seconds > _STUCK_SECONDS:
            return f"one look at the pods has taken {seconds:.0f} s so far"
        return None

    def unready_because(self) -> str | None:
        if because := self._feed.unready_because:
            return because
        if not self._reconciler.is_synced:
            return "not every pod has been looked at yet"
        return None

    async def metrics(self) -> bytes:
        counts = await self._gate_worker.counts()
        samples = [
            GateSample(guarded.pod, interface.name, counts.get(ifindex, {}))
            for guarded in self._reconciler.guarded.values()
            for ifindex, interface in guarded.gates.items()
        ]
        samples += [
            GateSample(RELAY, name, counts.get(ifindex, {}))
            for ifindex, name in self._launcher.interfaces.items()
        ]
        pods = [guarded.pod for guarded in self._reconciler.guarded.values()]
        self._metrics.refusals_untold = self._refusals.lost
        self._metrics.node_refusals = await self._node_refusals()
        self._metrics.policy_problems = len(self._host_access.problems)
        return self._metrics.render(pods, samples, await self._host_access.samples())

    async def report(self) -> Report:
        counts = await self._gate_worker.counts()
        return Report(
            version=VERSION,
            pid=os.getpid(),
            started=self._started,
            source_hash=sources.fingerprint(),
            attachment=self._gate_worker.attachment.value,
            was_compiled=self._gate_worker.loaded.was_compiled,
            load_ms=self._gate_worker.loaded.load_ms,
            is_synced=self._reconciler.is_synced,
            kubelet=self._kubelet.current.path if self._kubelet.current else None,
            kubelet_problem=self._kubelet.problem,
            http_address=self._http_address,
            hooks=[
                HookStatus(name=hook.name, problem=hook.problem)
                for hook in self._gate_worker.hook_states
            ],
            feed=self._feed.status(),
            node_refusals=await self._node_refusals(),
            relay=relay_status(
                self._relaying, self._connection_stats, self._launcher.interfaces, counts
            ),
            pods=[
                pod_status(
                    guarded,
                    counts,
                    conditions=self._conditions.of(guarded.pod.uid),
                    paths=self._reconciler.self_test.status(guarded),
                    older_flows=self._older_flows.count(guarded.pod.uid),
                    probes=self._probing.status(guarded.pod.uid),
                    carried=self._connection_stats.status(guarded.pod.uid),
                )
                for guarded in sorted(
                    self._reconciler.guarded.values(), key=lambda guarded: guarded.pod.full_name
                )
            ],
        )

    async def _node_refusals(self) -> dict[str, int]:
        counts = await self._gate_worker.node_counts()
        return {reason.label: count for (_, reason), count in counts.items()}

    async def drops(self) -> Drops:
        callers = await asyncio.to_thread(self._callers.read)
        return drops_of(callers, self._pod_of, lost_packets=self._callers.lost())

    async def rules(self) -> Rules:
        return await self._host_access.report()

    def _live_ifindexes(self) -> set[int] | None:
        """Gated interfaces; None until every pod has been looked at."""
        return self._gated() if self._reconciler.is_synced else None

    def _gate_count(self) -> int:
        return sum(len(guarded.gates) for guarded in self._reconciler.guarded.values())

    async def restart_relay(self) -> str | None:
        try:
            await self._relaying.restart()
        except RelayError as error:
            return f"The relay stays as it is: {error}"
        return None

    async def refusals(self, after: int) -> Refusals:
        return await self._refusals.after(after)

    def _pod_of(self, ifindex: int) -> Pod | None:
        for guarded in self._reconciler.guarded.values():
            if ifindex in guarded.gates:
                return guarded.pod
        return RELAY if ifindex in self._launcher.interfaces else None

    def _pod(self, uid: str) -> Pod | None:
        guarded = self._reconciler.guarded.get(uid)
        return guarded.pod if guarded else None

    def _gated(self) -> set[int]:
        return {
            ifindex for guarded in self._reconciler.guarded.values() for ifindex in guarded.gates
        } | self._launcher.interfaces.keys()

    def _on_relay_report(self, report: messages.RelayReport) -> None:
        self._connection_stats.keep_only(self._reconciler.guarded)
        self._connection_stats.add(report.samples)

    async def _on_gated(self, ifindexes: set[int]) -> None:
        self._origins.hint()
        if self._born_closed:
            await self._born_closed.gate(ifindexes)

    def _on_kubelet(self, found: KubeletCgroup | None) -> None:
        if self._born_closed:
            self._born_closed.admit(found)
        self._older_flows.hint()
        config = self._gate_worker.config
        config.set_kubelet(found.id if found else None)
        # Made by the kubelet at its first start, so looked for whenever there is one.
        cgroup2 = cgroup2_mount()
        if cgroup2 and (pods := pods_cgroup(cgroup2)):
            config.set_pods(*pods)

    def _feed_of(
        self, settings: Settings, api: ApiClient | None, policies: ApiPolicies | None
    ) -> PodFeed:
        if api and policies:
            cluster = Cluster(
                api,
                settings,
                self._metrics,
                conditions=self._conditions,
                policies=policies,
                on_pod=self._reconciler.set_pod,
                on_removed=self._reconciler.remove_pod,
                on_run=self._on_run,
            )
            self._metrics.registry.register(ClusterCollector(cluster))
            return cluster
        assert settings.manifests is not None  # `run`
        source = ManifestSource(
            settings.manifests,
            default_mode=settings.mode,
            on_pod=self._reconciler.set_pod,
            on_removed=self._reconciler.remove_pod,
        )
        return ManifestFeed(source, settings.manifests)

    def _on_condition(self, uid: str) -> None:
        self._feed.changed(uid)
        self._pod_info.hint()

    def _on_pods(self) -> None:
        self._older_flows.hint()
        self._relaying.hint()
        self._pod_info.hint()

    def _on_run(self, uid: str) -> None:
        guarded = self._reconciler.guarded.get(uid)
        if guarded is not None and guarded.gated_netns is not None:
            self._probing.update(guarded)

    def _on_node_change(self) -> None:
        self._feed.hint()
        self._reconciler.mark_pending()
        self._reconciler.places.hint()
        self._origins.hint()

    def _on_overrun(self) -> None:
        log.warning("netlink messages were lost; every pod is looked at again")
        self._reconciler.mark_all()
        self._origins.hint()
