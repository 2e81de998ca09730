"""Policy controller: computes each pod's rules from policies, labels, hostNetwork pods and cgroups,
and follows all of these.
"""

import asyncio
import collections
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from agent import tasks
from agent.admin.report import RulesReport
from agent.kube.node_report import NodePolicies
from agent.kube.objects import ObjectMetadata
from agent.kubelet.admitted_ports import kubelet_rules
from agent.linux.cgroups import CgroupId, cgroup2_mount
from agent.linux.pods_cgroup import PodsCgroup
from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.object_labels import LabelSnapshot, ObjectLabels
from agent.pods.pod import Pod
from agent.pods.pod_modes import PodModes
from agent.pods.pod_state import Admission
from agent.pods.store import PodStore
from agent.policy import rules_report
from agent.policy.api_source import ApiPolicies
from agent.policy.api_types import Policy, RuleSource
from agent.policy.cgroup_watches import CgroupWatches
from agent.policy.default_rules import DefaultRules
from agent.policy.effective import EffectivePolicies, PolicyProvider
from agent.policy.effects import PolicyEffects
from agent.policy.matching import RuleSet
from agent.policy.raw_sockets import RawSocketAdmission
from agent.policy.source_cgroups import SourceCgroups
from agent.settings import Settings
from bpf.errors import BpfError
from bpf.rule_hits import RuleHits
from bpf.verdicts import Mode

T = TypeVar("T")

log = structlog.get_logger(__name__)

# Sources are watched, so this is only for what nothing reports.
_PERIOD_SECONDS = 5.0
# With tens of thousands of cgroups in policies, resolving them must not fill a CPU: one part in
# four, and one in twenty where nothing reports changes.
_REST_PER_REFRESH = 3
_REST_WITHOUT_WATCHES = 19
_MAX_REST_SECONDS = 5.0
# The maximum of files takes 2 s to read; a file system that hangs must not go unnoticed.
_REFRESH_SECONDS = 60.0
_MAX_LINES = 20

_Admitted = tuple[Pod, Admission | None]


class PolicyController:
    """Computes the rules of each gate. `open` before the first gate, then `run`."""

    def __init__(
        self,
        settings: Settings,
        hits: RuleHits,
        raw_sockets: RawSocketAdmission,
        *,
        api: ApiPolicies | None,
        store: PodStore,
        labels: ObjectLabels,
        modes: PodModes,
        defaults: DefaultRules | None = None,
        cgroup2: pathlib.Path | None = None,
        pods_cgroup: PodsCgroup | None = None,
    ) -> None:
        """api: policies of a cluster, whose watch runs elsewhere; labels: of node and namespaces;
        modes: what waits for the default rules; defaults: of a cluster; cgroup2: for tests;
        pods_cgroup: what is known of it; `read_cgroups` after a change."""
        self._path = settings.rules
        self._state = settings.run_directory / "state" / "policies.json"
        self._api = api
        self._defaults = defaults
        self._modes = modes
        self.is_enabled = self._path is not None or api is not None
        """Whether there are sources of policies, so that `run` is needed."""
        self._effective = EffectivePolicies(())
        self._has_policies = asyncio.Event()
        """Set once the API server's policies are listed, or the wait for them is over."""
        self._hits = hits
        self._raw_sockets = raw_sockets
        self._raw_sockets_of: tuple[int, bool] | None = None
        """Generation and completeness of the rule set that raw sockets are admitted by."""
        self._store = store
        self._labels = labels
        self._used_labels = LabelSnapshot()
        self._wake = asyncio.Event()
        for changes in (store.desired, labels.changes):
            changes.subscribe(Subscription(self._wake))
        self._source_cgroups = SourceCgroups(cgroup2 or cgroup2_mount(), pods_cgroup)
        self._watches = CgroupWatches(self._source_cgroups, self._wake)
        self._rule_set = RuleSet()
        self._counted: set[int] = set()
        self._has_old_counters = True
        self._in_force: tuple[list[ObjectMetadata], dict[str, str]] | None = None
        """The API server's policies of the current rule set, and problems by name."""
        self._effects = PolicyEffects()

    async def open(self) -> None:
        """Read the policies for the first time, so that no gate is attached without its rules."""
        if self._api is None:
            self._has_policies.set()
        if not self.is_enabled:
            self._hits.retain(())
            await self._admit_raw_sockets()
            return
        self._effective = EffectivePolicies(await self._sources())
        await asyncio.to_thread(self._effective.restore)
        self._rule_set, _ = await self._refreshed()
        await self._admit_raw_sockets()

    async def _sources(self) -> list[PolicyProvider[Policy]]:
        """Of two policies with one name that of the first source is in force."""
        sources: list[PolicyProvider[Policy]] = []
        if self._path:
            sources.append(await asyncio.to_thread(_files, self._path, self._state))
        if self._api:
            sources.append(self._api)
        if self._defaults:
            sources.append(self._defaults)
        return sources

    async def run(self) -> None:
        """Follow policies and cgroups until cancelled.

        Raises `TimeoutError` if the file system hangs.
        """
        if self._api:
            await self._api.first_list()
        with self._watches.opened():
            await self._follow()
            self._has_policies.set()
            async with asyncio.TaskGroup() as group:
                follow = functools.partial(
                    self._effective.follow, self._wake, at_least_every_seconds=_PERIOD_SECONDS
                )
                tasks.start(group, "changes of policies", follow)
                tasks.start(group, "cgroups", self._watches.run)
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    seconds = await self._follow()
                    is_watched = self._watches.are_complete
                    rest = _REST_PER_REFRESH if is_watched else _REST_WITHOUT_WATCHES
                    await asyncio.sleep(min(seconds * rest, _MAX_REST_SECONDS))

    def read_cgroups(self) -> None:
        """Find the cgroups of sources again, soon."""
        self._wake.set()

    async def _follow(self) -> float:
        """Apply the current policies and cgroups. Returns the CPU seconds that reading them took:
        on a busy machine the time is that of others."""
        async with asyncio.timeout(_REFRESH_SECONDS):
            rule_set, seconds = await self._refreshed()
        if rule_set.generation != self._rule_set.generation:
            await self._apply(rule_set)
        if self._api and self._api.has_list:
            self._in_force = self._api.newest(), self._api.invalid()
        await self._admit_raw_sockets()
        if self._api and self._api.has_list and self._defaults and self._defaults.is_listed:
            self._modes.apply_rules()
        if self._has_old_counters and self._store.is_settled:
            self._has_old_counters = False
            ids = set(self._rule_set.ids.values())
            self._counted &= ids
            self._rule_set.selected.retain(set(self._store.pods))
            await asyncio.to_thread(self._hits.retain, ids)
        return seconds

    async def admit(self, pod: Pod) -> Admission:
        """The rules of the pod's gate; their hit counters are created first."""
        await self._has_policies.wait()
        own = kubelet_rules(pod.spec)
        while True:
            rule_set = self._rule_set
            admission = await asyncio.to_thread(rule_set.admit, pod, own)
            if rule_set.generation == self._rule_set.generation:
                break
        ids = {rule.id for rule in admission.rules if rule.id} - self._counted
        try:
            self._hits.add(ids)
            self._counted |= ids
        except BpfError as error:
            log.warning(Event.RULE_HITS_UNCOUNTED, pod=pod.full_name, error=str(error))
        return admission

    @property
    def problems(self) -> list[str]:
        """Policies and sources that are not applied as written, one sentence each."""
        return self._effective.problems

    @property
    def without_effect(self) -> list[str]:
        """Policies of this node that select no pod or find no source, one sentence each."""
        return list(self._effects.problems()) if self._store.is_settled else []

    @property
    def expiries(self) -> dict[str, float]:
        """When policies in force expire, as Unix time, by name; without those that never do."""
        return {
            policy.name: policy.expires
            for policy in self._rule_set.policies
            if policy.expires is not None
        }

    @property
    def skipped(self) -> dict[str, int]:
        """Rules that gates have no room for, by policy."""
        names = (state.admission.skipped for state in self._store.states() if state.admission)
        return dict(collections.Counter(itertools.chain.from_iterable(names)))

    def node_policies(self) -> NodePolicies | None:
        """What the node reports of the API server's policies; None while gates are behind."""
        if self._in_force is None or not self._store.is_settled:
            return None
        policies, problems = self._in_force
        problems = problems | {
            name: f"{count} rules have no room in gates of this node's pods."
            for name, count in self.skipped.items()
        }
        effects = self._effects.encoded(sorted(one.name for one in policies))
        return NodePolicies.of(policies, problems, effects)

    def documents(self) -> list[dict[str, Any]]:
        """The policies in force, as objects of the API."""
        return [msgspec.to_builtins(policy.document) for policy in self._rule_set.policies]

    async def samples(self) -> list[rules_report.RuleSample]:
        """Hits of every rule with a counter."""
        hits = await asyncio.to_thread(self._hits.read)
        return rules_report.samples(self._rule_set, hits)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Those in force."""
        return self._rule_set.policies

    @property
    def staged(self) -> tuple[Policy, ...]:
        """Those with action Audit."""
        return self._effective.staged

    async def report(self) -> RulesReport:
        """The policies in force, with hits."""
        gated = [
            (state.pod, state.admission)
            for state in self._store.states()
            if state.pod.mode is not Mode.OFF and not state.pod.host_network
        ]
        hits = await asyncio.to_thread(self._hits.read)
        return await asyncio.to_thread(
            rules_report.of, self._rule_set, gated, self._effective, hits
        )

    async def _refreshed(self) -> tuple[RuleSet, float]:
        """The current rule set, and the CPU seconds that it took."""
        labels = self._labels.snapshot()
        pods = [state.pod for state in self._store.states()]
        return await asyncio.to_thread(_timed, self._refresh, self._rule_set, labels, pods)

    def _refresh(self, rule_set: RuleSet, labels: LabelSnapshot, pods: Sequence[Pod]) -> RuleSet:
        """The current rule set; of the same generation if nothing changed. Blocks."""
        if self._effective.refresh() or labels != self._used_labels:
            self._used_labels = labels
            rule_set = rule_set.with_policies(self._effective.policies, labels)
            log.info(
                Event.POLICIES_APPLIED,
                policies=len(rule_set.policies),
                sources=self._effective.names,
            )
        sources = rule_set.sources()
        host_pods = [pod for pod in pods if pod.host_network]
        cgroups = self._source_cgroups.resolve(sources, _uids(rule_set, labels, host_pods))
        rule_set = rule_set.with_cgroups(cgroups)
        self._effects.update(rule_set, [pod for pod in pods if not pod.host_network])
        if rule_set.generation != self._rule_set.generation:
            before = _missing(self._rule_set.sources(), self._rule_set.cgroups)
            _log_cgroups(_missing(sources, cgroups), before)
        return rule_set

    async def _apply(self, rule_set: RuleSet) -> None:
        """Use this rule set, and mark the pods whose rules change."""
        # First, so that `admit` uses the new one from now on.
        before, self._rule_set = self._rule_set, rule_set
        self._has_old_counters = True
        admitted = [(state.pod, state.admission) for state in self._store.states()]
        for uid in await asyncio.to_thread(_changed, before, rule_set, admitted):
            self._store.changed_rules.mark(uid)

    async def _admit_raw_sockets(self) -> None:
        is_complete = self._api is None or self._api.has_list
        admitted = self._rule_set.generation, is_complete
        if self._raw_sockets_of != admitted:
            self._raw_sockets_of = admitted
            update = self._raw_sockets.update
            await asyncio.to_thread(update, self._rule_set, is_complete=is_complete)


def _files(path: pathlib.Path, state: pathlib.Path) -> PolicyProvider[Policy]:
    """Policies in files. Few agents have some, and importing YAML takes 30 ms."""
    from agent.policy.files import PolicyFiles

    return PolicyFiles(path, state=state)


def _timed(call: Callable[..., T], *arguments: object) -> tuple[T, float]:
    """The result, and the CPU seconds of this thread."""
    started = time.thread_time()
    return call(*arguments), time.thread_time() - started


def _uids(
    rule_set: RuleSet, labels: LabelSnapshot, host_pods: Sequence[Pod]
) -> dict[str, list[str]]:
    """The uids of the hostNetwork pods that each source selects, by `RuleSource.name`."""
    return {
        name: [
            pod.uid
            for pod in host_pods
            if selector.matches(pod.namespace, pod.labels, labels.of_namespace(pod.namespace))
        ]
        for name, selector in rule_set.host_pods().items()
    }


def _changed(before: RuleSet, after: RuleSet, admitted: Iterable[_Admitted]) -> list[str]:
    """Uids of pods whose rules change."""
    affected: set[str] | None = None
    if before.selected_since == after.selected_since:
        cgroups = before.cgroups, after.cgroups
        affected = {
            policy.name
            for policy in after.policies
            if any(
                cgroups[0].get(rule.source.name) != cgroups[1].get(rule.source.name)
                for rule in policy.rules
            )
        }
    return [
        pod.uid
        for pod, admission in admitted
        if admission
        and (affected is None or any(policy.name in affected for policy in after.selected.of(pod)))
        and after.admit(pod, kubelet_rules(pod.spec)) != admission
    ]


def _missing(
    sources: Iterable[RuleSource], cgroups: Mapping[str, tuple[CgroupId, ...]]
) -> set[str]:
    """Sources without a cgroup, but for pods: a policy of a cluster is rarely for all nodes."""
    return {
        source.name for source in sources if source.name not in cgroups and source.kind != "pods"
    }


def _log_cgroups(missing: set[str], before: set[str]) -> None:
    """Log each cgroup that is missing now, and each that is back."""
    for path in sorted(missing - before)[:_MAX_LINES]:
        log.warning(Event.RULE_CGROUP_MISSING, cgroup=path)
    if len(missing - before) > _MAX_LINES:
        log.warning(Event.RULE_CGROUPS_MISSING, count=len(missing - before) - _MAX_LINES)
    for path in sorted(before - missing)[:_MAX_LINES]:
        log.info(Event.RULE_CGROUP_RESOLVED, cgroup=path)
