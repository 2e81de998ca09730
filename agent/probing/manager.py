"""Probes of all pods: publishes results as conditions, metrics and status."""

import asyncio
import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import core

from agent import labels, tasks
from agent.admin.report import AnswerStatus, ProbeStatus
from agent.pods.changes import Subscription
from agent.pods.conditions import FALSE, TRUE
from agent.pods.container_runs import ContainerSource, PodContainers
from agent.pods.events import PodEvent, PodEvents, kubelet_reports
from agent.pods.pod import Pod
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.probing.answer_problems import AnswerProblems
from agent.probing.answered_probes import AnsweredProbes
from agent.probing.answers import ProbeName
from agent.probing.certificates import ProbeCertificates
from agent.probing.first_successes import FirstSuccesses
from agent.probing.listeners import ListenerWatch
from agent.probing.lookups import ListenerLookups
from agent.probing.metrics import ProbeMetrics
from agent.probing.recent import RecentProbes
from agent.probing.result_store import (
    Results,
    ResultStore,
    SavedProbes,
    reported_results,
    sandbox_of,
)
from agent.probing.spec_changes import SpecChanges
from bpf import pins
from probes.engine.families import PodInterfaces
from probes.engine.prober import Prober
from probes.engine.scheduler import (
    ProbedContainer,
    ProbedPod,
    ProbeKey,
    ProbeState,
    Scheduler,
)
from probes.netns import Netns, NetnsError
from probes.protocols.client_certificates import names_of
from probes.redirection import Acceptors
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.specs import ContainerProbes, Exec

# After a restart, 1,500 probes at once would block everything else for 100 ms. Spread over a second
# they take a tenth of it, and no pod waits longer than its probe's period.
_SPREAD_SECONDS = 1.0


class ProbeManager:
    """Runs the probes of all pods. Create it on the running event loop."""

    def __init__(
        self,
        store: PodStore,
        installation: pins.Pins,
        *,
        containers: ContainerSource,
        events: PodEvents,
        answered: AnsweredProbes,
        state: pathlib.Path | None = None,
        passing_since: Callable[[str], float | None] | None = None,
        connect_every: int,
        certificates: ProbeCertificates,
    ) -> None:
        """containers: of all pods, where a runtime lists them; answered: gets the probes that the
        relay is to answer, and their results; state: the file that keeps results across restarts
        of the agent; None keeps none; passing_since: since when the API server has a pod's
        probes as passing, by uid, as Unix time; for a pod that the file lacks; connect_every: in
        which periods a tcp probe connects though a lookup may decide it; 1: in all; certificates:
        of clients, which probes may name.
        """
        self._store = store
        self._containers = containers
        self._events = events
        self._answered = answered
        self._answer_problems = AnswerProblems()
        self._changes = Subscription()
        store.desired.subscribe(self._changes)
        store.in_force.subscribe(self._changes)
        containers.changes.subscribe(self._changes)
        self.certificates = certificates
        certificates.changes.subscribe(self._changes)
        self._metrics = ProbeMetrics(store)
        loop = asyncio.get_running_loop()
        self.acceptors = Acceptors(loop.time)
        """Who accepts the probes' connections."""
        self._scheduler = Scheduler(
            starter=Prober(loop, self.acceptors),
            on_result=self._on_result,
            on_probe=self._on_probe,
            on_check=answered.record,
            on_delay=self._metrics.start_delay.observe,
            spread_seconds=_SPREAD_SECONDS,
        )
        self._listeners = ListenerWatch(self._scheduler, self._metrics, installation)
        self._lookups = ListenerLookups(
            *(self._scheduler, self.acceptors, installation),
            on_lookups=self._on_lookups,
            connect_every=connect_every,
        )
        self._pods: dict[str, Pod] = {}
        self._probed: set[str] = set()
        self._targets: dict[str, tuple[Pod, tuple[str, ...], ProbedPod]] = {}
        """By pod: from what its probes follow, with its own addresses."""
        self._results = ResultStore(state)
        self._passing_since = passing_since
        self._recent = RecentProbes()
        self._firsts = FirstSuccesses(self._metrics.observe_first_success)
        self._sandboxes: dict[str, tuple[Netns, str]] = {}
        self._spec_changes = SpecChanges(self._results, events)

    async def run(self) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "scheduler", self._scheduler.run)
            tasks.start(group, "listeners", self._listeners.run)
            tasks.start(group, "listener lookups", self._lookups.run)
            tasks.start(group, "probe memory", self._results.run)
            tasks.start(group, "pods to probe", self._follow)

    async def _follow(self) -> None:
        """Start, change and stop probes as pods do."""
        while True:
            for uid in await self._changes.next():
                state = self._store.get(uid)
                probed = self._pods.get(uid)
                if probed and (state is None or state.pod.netns_path != probed.netns_path):
                    self.remove(uid)
                    if state is None:
                        self._metrics.forget(probed)
                elif state is None:
                    self._listeners.forget(uid)
                if state is not None and state.status is not None:
                    self.update(state)
                elif state is not None and has_instant_probes(state.pod):
                    self._watch_early(state.pod)

    def _watch_early(self, pod: Pod) -> None:
        """Before the pod's gate, and so in most cases before its containers: listeners that are
        older than the watch take 3 ms of CPU to follow."""
        if pod.netns_path is not None:
            with contextlib.suppress(NetnsError):
                self._listeners.watch(pod.uid, Netns.open(pod.netns_path))

    def collect(self) -> Iterator[core.Metric]:
        self._scheduler.lookups.settle()
        return self._metrics.collect(
            in_flight=self._scheduler.in_flight, queued=self._scheduler.waiting
        )

    async def listening(self) -> None:
        """Wait until listener events are received; forever if they are unavailable."""
        await self._listeners.attached.wait()

    def update(self, state: PodState) -> None:
        """Start or change the probes of a pod as it is now, and update its condition."""
        pod = state.pod
        sandbox = None
        if state.netns is not None:
            sandbox = self._results.claim(pod.uid, self._sandbox_of(pod, state.netns))
            pod = self._spec_changes.take(pod, sandbox)
        self._pods[pod.uid] = pod
        if sandbox and (target := self._target(pod, state, sandbox)):
            # A pod that starts is marked some ten times, most of them for others' sake.
            what = pod, state.own_addresses, target
            if what != self._targets.get(pod.uid):
                self._targets[pod.uid] = what
                self._probe(pod, state.own_addresses, target)
            self._answer_problems.update(pod, self._answered.plan(pod.uid))
        self._update_condition(pod)

    def _probe(self, pod: Pod, own_addresses: tuple[str, ...], target: ProbedPod) -> None:
        # First, so that the first check finds its place.
        running = {c.probes.name: c.container_id for c in target.containers if c.running}
        self._answered.set_pod(pod.uid, pod.spec, own_addresses, running)
        self._scheduler.set_pod(target)
        self._probed.add(pod.uid)
        self._save(pod.uid)
        if has_instant_probes(pod):
            self._listeners.watch(pod.uid, target.netns)

    def remove(self, uid: str) -> None:
        """Stop the pod's probes and forget it."""
        self._scheduler.remove_pod(uid)
        self._answered.forget(uid)
        self.certificates.forget(uid)
        self._answer_problems.forget(uid)
        self._listeners.forget(uid)
        self._pods.pop(uid, None)
        self._probed.discard(uid)
        self._targets.pop(uid, None)
        self._results.forget(uid)
        self._recent.forget(uid)
        self._firsts.forget(uid)
        self._sandboxes.pop(uid, None)
        self._spec_changes.forget(uid)

    def status(self, uid: str, answers: Mapping[ProbeName, AnswerStatus]) -> list[ProbeStatus]:
        """The pod's probes, for `podgate status`, with what the kubelet's get."""
        pod = self._pods.get(uid)
        if pod is None:
            return []
        self._scheduler.lookups.settle(uid)
        handlers = {
            (container.name, kind): str(probe.handler)
            for container in pod.spec.containers
            for kind, probe in (
                ("Startup", container.startup),
                ("Readiness", container.readiness),
                ("Liveness", container.liveness),
            )
            if probe is not None
        }
        return [
            ProbeStatus(
                container=found.key.container,
                type=found.key.type.value,
                handler=handlers.get((found.key.container, found.key.type.value), ""),
                result=_shown(found).value,
                last_message=found.outcome.message if found.outcome else "",
                families=list(found.outcome.families) if found.outcome else [],
                successes=found.passed,
                failures=found.failed,
                recent_ms=self._recent.of(found.key),
                is_redirected=found.outcome is not None and found.outcome.is_redirected,
                lacks_certificate=found.outcome is not None and found.outcome.lacks_certificate,
                is_looked_up=found.outcome is not None and found.outcome.is_looked_up,
                lookups_differ=found.lookups_differ,
                answer=answers.get(ProbeName(found.key.container, found.key.type)),
            )
            for found in self._scheduler.snapshot(uid)
        ]

    def _sandbox_of(self, pod: Pod, netns: Netns) -> str:
        """Read once: a lack of descriptors later must not look like another sandbox."""
        saved = self._sandboxes.get(pod.uid)
        if saved is None or saved[0] != netns:
            saved = self._sandboxes[pod.uid] = (netns, sandbox_of(netns))
        return saved[1]

    def _save(self, uid: str) -> None:
        """Keep the pod's results for the next agent."""
        sandbox = self._results.get(uid)
        if sandbox is None:
            return
        results: Results = {}
        for key, result in self._scheduler.results(uid).items():
            results.setdefault(key.container, {})[key.type] = result
        if results != sandbox.results:
            sandbox.results = results
            self._results.save_soon()

    def _target(self, pod: Pod, state: PodState, sandbox: SavedProbes) -> ProbedPod | None:
        netns = state.netns
        if netns is None or state.network is None:
            return None
        run = self._containers.containers_of(pod.uid)
        target = ProbedPod(
            uid=pod.uid,
            netns=netns,
            addresses=state.probe_addresses,
            containers=tuple(
                self._container(pod, probes, sandbox, run) for probes in pod.spec.containers
            ),
            deleting=run is not None and run.is_deleting,
            interfaces=PodInterfaces(state.network.by_interface, pod.spec.networks),
            netns_id=state.network.nsid,
            is_loopback_down=state.network.is_loopback_down,
            certificates=self.certificates.of(
                pod.uid, pod.namespace, names_of(pod.spec.containers)
            ),
        )
        if run is not None:
            self._firsts.set_containers(pod.uid, run.containers)
            ids = {name: container.id for name, container in run.containers.items()}
            if ids != sandbox.containers:
                sandbox.containers = ids
                self._results.save_soon()
        return target

    def _container(
        self, pod: Pod, probes: ContainerProbes, sandbox: SavedProbes, run: PodContainers | None
    ) -> ProbedContainer:
        # Results of a previous agent count for its sandbox, until this one has probed.
        restored = {} if pod.uid in self._probed else sandbox.results.get(probes.name, {})
        if run is None:
            # Without a container runtime, a sandbox's containers live as long as it does.
            return ProbedContainer(
                probes=probes,
                container_id=sandbox.sandbox,
                started_at=sandbox.started_at,
                restored=restored,
            )
        container = run.containers.get(probes.name)
        if container is None:
            return ProbedContainer(probes=probes, running=False, restarts=run.is_restartable)
        if not sandbox.containers and pod.uid not in self._probed:
            since = self._passing_since(pod.uid) if self._passing_since else None
            restored = reported_results(since, container.started_at)
        elif sandbox.containers.get(probes.name) != container.id:
            restored = {}
        is_startup_ours = not (probes.startup and isinstance(probes.startup.handler, Exec))
        return ProbedContainer(
            probes=probes,
            container_id=container.id,
            started_at=container.started_at,
            running=container.is_running,
            restarts=run.is_restartable,
            started=None if is_startup_ours else bool(container.started_by_kubelet),
            restored=restored,
            started_by_kubelet=bool(container.started_by_kubelet),
        )

    def _on_result(self, key: ProbeKey, result: ProbeResult) -> None:
        if pod := self._pods.get(key.uid):
            self._save(key.uid)
            self._update_condition(pod)

    def _on_probe(self, key: ProbeKey, outcome: ProbeOutcome) -> None:
        pod = self._pods.get(key.uid)
        if pod is None:
            return
        if outcome.shows_nothing:
            self._update_condition(pod)
        if outcome.error:
            return
        self._metrics.count_probe(
            pod,
            container=key.container,
            probe_type=key.type.value,
            result="successful" if outcome.passed else "failed",
            seconds=outcome.duration_seconds,
        )
        self._recent.add(key, outcome)
        self._record(pod, key, outcome)
        if outcome.passed:
            self._firsts.passed(key)
        else:
            # Update the message even if the status stays False: it has the newest error.
            self._update_condition(pod)

    def _on_lookups(self, key: ProbeKey, seconds: list[float]) -> None:
        """Successes that no connection has found."""
        if pod := self._pods.get(key.uid):
            self._metrics.count_successes(
                pod, container=key.container, probe_type=key.type.value, seconds=seconds
            )
            self._recent.add_successes(key, seconds)

    def _record(self, pod: Pod, key: ProbeKey, outcome: ProbeOutcome) -> None:
        """Report a failure in the kubelet's words (pkg/kubelet/events/event.go), unless the kubelet
        runs the same probe and reports it itself."""
        is_warning = outcome.result is ProbeResult.WARNING
        if outcome.passed and not is_warning:
            return
        if kubelet_reports(pod.spec, key.container, key.type.value.lower()):
            return
        reason, what = ("ProbeWarning", "warning") if is_warning else ("Unhealthy", "failed")
        message = f"{key.type.value} probe {what}: {outcome.message}"
        event = PodEvent(pod.uid, reason, message, action="Probing", container=key.container)
        self._events.record(event)

    def _update_condition(self, pod: Pod) -> None:
        state = self._store.get(pod.uid)
        if state is None or state.pod.netns_path != pod.netns_path:
            return  # Its probes will be stopped next.
        status, reason, message = self._evaluate(pod)
        message += self._answer_problems.text(pod.uid) + self._spec_changes.text(pod.uid)
        self._store.conditions.set(pod, labels.PROBES_PASSING, status, reason, message)

    def _evaluate(self, pod: Pod) -> tuple[str, str, str]:
        if problem := pod.probe_problem:
            return FALSE, problem.reason, problem.message
        if pod.host_network:
            # True: a readiness gate on it must not block the pod forever.
            return TRUE, "HostNetwork", "The kubelet alone probes hostNetwork pods."
        if not pod.has_spec:
            return FALSE, "PodSpecUnknown", "The pod's probes are not known yet."
        if pod.uid not in self._probed:
            return FALSE, "NoNetns", "The pod has no network namespace yet."
        passes, reason, message = self._scheduler.passing(pod.uid)
        return (TRUE if passes else FALSE), reason, message


def has_instant_probes(pod: Pod) -> bool:
    """Whether it has probes that run once a listener opens or closes."""
    return any(container.readiness or container.startup for container in pod.spec.containers)


def _shown(probe: ProbeState) -> ProbeResult:
    """The result that counts; unknown while probes do not get to the application."""
    shows_nothing = probe.outcome is not None and probe.outcome.shows_nothing
    return ProbeResult.UNKNOWN if shows_nothing else probe.result or ProbeResult.UNKNOWN
