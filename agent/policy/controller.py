"""Rules from outside: policies followed, cgroups followed, and pods' gates told of both."""

import asyncio
import pathlib
import time
from collections.abc import Iterable, Sequence

import structlog

from agent.admin.report import PolicyStatus, RulesReport, RuleStatus
from agent.kubelet.admitted_ports import kubelet_rules
from agent.linux import cgroups as linux_cgroups
from agent.linux.cgroups import cgroup2_mount
from agent.metrics import RuleSample
from agent.pods.pod import Pod
from agent.pods.pod_state import Admission
from agent.pods.store import PodStore
from agent.policy.api_source import ApiPolicies
from agent.policy.effective import EffectivePolicies, PolicyProvider
from agent.policy.files import PolicyFiles
from agent.policy.matching import RuleSet
from agent.settings import Settings
from bpf.errors import BpfError
from bpf.rule_hits import RuleHits
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)

# A service that is started anew has a new cgroup, and its first SYN is sent again after 1 s.
_PERIOD_SECONDS = 0.25
# Where policies name tens of thousands of cgroups, looking for them must not fill a CPU: one part
# in twenty, but for changed files, which are read once.
_REST_PER_REFRESH = 19
_MAX_REST_SECONDS = 5.0
# As many files as are ever read take 2 s; a file system that hangs must not go unnoticed.
_REFRESH_SECONDS = 60.0
_MAX_LINES = 20

_Admitted = tuple[Pod, Admission | None]


class PolicyController:
    """Says what each gate lets in. `open` before the first gate, then `run`."""

    def __init__(
        self,
        settings: Settings,
        hits: RuleHits,
        *,
        api: ApiPolicies | None,
        store: PodStore,
        cgroup2: pathlib.Path | None = None,
    ) -> None:
        """api: policies of a cluster, whose watch somebody else runs; guarded: all pods; on_change
        gets the uid of one whose gate has to be told; is_settled: whether all gates are as was
        wanted last; cgroup2: for tests.
        """
        self._path = settings.rules
        self._state = settings.run_directory / "state" / "policies.json"
        self._api = api
        self.is_enabled = self._path is not None or api is not None
        """Whether there is anything to `run` for."""
        self._in_force = EffectivePolicies(())
        self._has_policies = asyncio.Event()
        """Set when the API server has had its moment to tell of policies."""
        self._hits = hits
        self._store = store
        self._cgroup2 = cgroup2 or cgroup2_mount()
        self._book = RuleSet()
        self._counted: set[int] = set()
        self._has_old_counters = True

    async def open(self) -> None:
        """Read the policies for the first time, so that no gate is made without its rules."""
        if self._api is None:
            self._has_policies.set()
        if not self.is_enabled:
            self._hits.retain(())
            return
        sources: list[PolicyProvider] = []
        if self._path:
            sources.append(await asyncio.to_thread(PolicyFiles, self._path, state=self._state))
        if self._api:
            sources.append(self._api)
        self._in_force = EffectivePolicies(sources)
        await asyncio.to_thread(self._in_force.restore)
        self._book = await asyncio.to_thread(self._refresh, self._book)

    async def run(self) -> None:
        """Follow policies and cgroups, for ever, where there are policies to follow.

        Raises `TimeoutError` when the file system does not answer.
        """
        if self._api:
            await self._api.first_list()
        await self._follow()
        self._has_policies.set()
        async for _ in self._in_force.changes(at_least_every_seconds=_PERIOD_SECONDS):
            seconds = await self._follow()
            await asyncio.sleep(min(seconds * _REST_PER_REFRESH, _MAX_REST_SECONDS))

    async def _follow(self) -> float:
        """Have in force what is to be now. Returns the seconds that it took to find out."""
        started = time.monotonic()
        async with asyncio.timeout(_REFRESH_SECONDS):
            book = await asyncio.to_thread(self._refresh, self._book)
        seconds = time.monotonic() - started
        if book is not self._book:
            await self._apply(book)
        if self._has_old_counters and self._store.is_settled:
            self._has_old_counters = False
            ids = set(self._book.ids.values())
            self._counted &= ids
            await asyncio.to_thread(self._hits.retain, ids)
        return seconds

    async def admit(self, pod: Pod) -> Admission:
        """What the pod's gate lets in, with counters for it made before."""
        await self._has_policies.wait()
        own = kubelet_rules(pod.spec)
        while True:
            book = self._book
            admission = await asyncio.to_thread(book.admit, pod, own)
            if book is self._book:
                break
        ids = {rule.id for rule in admission.rules if rule.id} - self._counted
        try:
            self._hits.add(ids)
            self._counted |= ids
        except BpfError as error:
            log.warning("hits of some rules are not counted", pod=pod.full_name, error=str(error))
        return admission

    @property
    def problems(self) -> list[str]:
        """What is not in force as it stands, one sentence each."""
        return self._in_force.problems

    async def samples(self) -> list[RuleSample]:
        """Hits of every rule that a gate has had."""
        hits = await asyncio.to_thread(self._hits.read)
        return [
            RuleSample(policy, str(rule.sender), rule.protocol_text, rule.ports_text, hits[number])
            for (policy, rule), number in self._book.ids.items()
            if number in hits
        ]

    async def report(self) -> RulesReport:
        gated = [
            (guarded.pod, guarded.admission)
            for guarded in self._store.states()
            if guarded.pod.mode is not Mode.OFF and not guarded.pod.host_network
        ]
        return await asyncio.to_thread(self._report, self._book, gated)

    def _refresh(self, book: RuleSet) -> RuleSet:
        """The book as it has to be now; the same one if nothing changed. Blocks."""
        if self._in_force.refresh():
            book = RuleSet.of(self._in_force.policies).with_cgroups(book.cgroups)
            log.info("policies in force", policies=len(book.policies), of=self._in_force.names)
        cgroup_paths = book.cgroup_paths()
        cgroups = linux_cgroups.resolve(self._cgroup2, cgroup_paths)
        if cgroups == book.cgroups and book is self._book:
            return book
        _log_cgroups(
            cgroup_paths - cgroups.keys(), self._book.cgroup_paths() - self._book.cgroups.keys()
        )
        return book.with_cgroups(cgroups)

    async def _apply(self, book: RuleSet) -> None:
        """Have gates told whose rules are others now."""
        # First, so that whoever asks from now on is told by the new book.
        self._book = book
        self._has_old_counters = True
        admitted = [(guarded.pod, guarded.admission) for guarded in self._store.states()]
        for uid in await asyncio.to_thread(_changed, book, admitted):
            self._store.mark(uid)

    def _report(self, book: RuleSet, gated: Sequence[_Admitted]) -> RulesReport:
        hits = self._hits.read()
        found = [
            PolicyStatus(
                name=policy.name,
                source=policy.source,
                pods=sorted(pod.full_name for pod, _ in gated if policy.pods.matches(pod)),
                rules=[
                    RuleStatus(
                        source=str(rule.sender),
                        protocol=rule.protocol_text,
                        ports=rule.ports_text,
                        hits=hits.get(book.ids[policy.name, rule], 0),
                        problem=book.problem(rule),
                    )
                    for rule in policy.rules
                ],
            )
            for policy in book.policies
        ]
        problems = self._in_force.problems
        problems += sorted(
            f"Pod {pod.full_name}: {admission.problem}"
            for pod, admission in gated
            if admission and admission.problem
        )
        return RulesReport(sources=self._in_force.names, policies=found, problems=problems)


def _changed(book: RuleSet, admitted: Iterable[_Admitted]) -> list[str]:
    """Uids of pods that are let in to otherwise than before."""
    return [
        pod.uid
        for pod, admission in admitted
        if admission and book.admit(pod, kubelet_rules(pod.spec)) != admission
    ]


def _log_cgroups(missing: set[str], before: set[str]) -> None:
    """One line for each cgroup that has gone missing, and for each that is back."""
    for path in sorted(missing - before)[:_MAX_LINES]:
        log.warning(
            "cgroup is not there; rules that name it let nobody in until it is", cgroup=path
        )
    if len(missing - before) > _MAX_LINES:
        log.warning("more cgroups are not there", cgroups=len(missing - before) - _MAX_LINES)
    for path in sorted(before - missing)[:_MAX_LINES]:
        log.info("cgroup is there, or no longer named by a rule", cgroup=path)
