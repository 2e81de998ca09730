"""The node's findings as Events and as a metric."""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client import core

from agent import tasks
from agent.admin import finding_kinds as kinds
from agent.admin.finding import NODE, Finding
from agent.admin.finding_kinds import Kind, Severity
from agent.metrics import MetricFamily, labelled
from agent.pods.changes import Subscription
from agent.pods.events import PodEvent, PodEvents
from agent.pods.store import PodStore

FINDINGS = MetricFamily(
    "podgate_findings",
    "gauge",
    "What is wrong on the node, by kind (docs/reference/findings.md): the number of pods, labels "
    "or parts that it is found of. No series for a kind of which there is none.",
    ("severity", "kind"),
)

GUARD_IN_FORCE = MetricFamily(
    "podgate_guard_in_force",
    "gauge",
    "1 if a guard is in force, 0 if a finding is that it is not: hooks (at connect), default_deny, "
    "raw_sockets, host_probes, path_tests, kubelet_followed. Absent for one that is not "
    "configured, or has nothing to guard now.",
    ("guard",),
)
GUARDS: Mapping[str, tuple[Kind, ...]] = {
    "hooks": (kinds.HOOK_MISSING,),
    "default_deny": (kinds.DEFAULT_DENY_MISSING,),
    "raw_sockets": (kinds.RAW_SOCKETS_NOT_DENIED,),
    "host_probes": (kinds.HOST_PROBES_NOT_DENIED,),
    "path_tests": (kinds.PATH_TEST_FAILED,),
    "kubelet_followed": (
        *(kinds.KUBELET_NOT_FOLLOWED, kinds.KUBELET_UNKNOWN, kinds.DECLARED_PORTS_OPEN),
    ),
}
"""The findings that each guard is not in force, by its name."""

_PERIOD_SECONDS = 5.0
# To find them takes 40 us of CPU for each pod. Without a change of pods or of the kubelet the rest
# is this many times as long, so a full node's cost no more than those of a small one.
_REST_PER_FIND, _LONGEST_PERIOD_SECONDS = 2500.0, 30.0
# What an agent lacks for a moment while it starts is no Event, unless something is open.
_SETTLE_SECONDS = 5.0
# An Event exists for an hour, and one that is repeated within six minutes is counted.
_REPEAT_SECONDS = 300.0
# The kubelet, or the probes' own Events, report failures of probes; the others end by themselves,
# or are about the way to the API server.
_WITHOUT_EVENT = frozenset(
    {
        kinds.PROBE_FAILING.name,
        kinds.PODS_NOT_SYNCED.name,
        kinds.WATCH_BROKEN.name,
        kinds.CONDITIONS_NOT_WRITTEN.name,
    }
)


class NodeFindings:
    """Records an Event for each finding that is new, and counts all. `refresh` it before each
    scrape."""

    def __init__(
        self,
        find: Callable[[], list[Finding]],
        events: PodEvents,
        store: PodStore,
        *,
        guards: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """find: the current ones; guards: those that are configured now."""
        self._find = find
        self._guards = guards
        self._events = events
        self._store = store
        self._current: list[Finding] = []
        self._is_pending = False
        """Whether an Event is due soon."""
        self._repeat_at: dict[tuple[str, str, str], float] = {}
        """By kind, subject and sentence, when its Event is due again."""
        self._woken = asyncio.Event()
        changes = Subscription(self._woken)
        for source in (store.in_force, store.desired, store.conditions.changes):
            source.subscribe(changes)
        self._changes = changes

    def hint(self) -> None:
        """There may be others now."""
        self._woken.set()

    async def run(self) -> None:
        """Record Events until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            self._woken.clear()
            self._changes.take()
            started, started_cpu = now(), time.thread_time()
            self.record()
            seconds = (time.thread_time() - started_cpu) * _REST_PER_FIND
            await tasks.tick(_PERIOD_SECONDS)
            if not self._is_pending:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(started + min(seconds, _LONGEST_PERIOD_SECONDS)):
                        await self._woken.wait()

    def record(self) -> None:
        """Record an Event for each finding that is new, or has lasted for five minutes since."""
        now = asyncio.get_running_loop().time()
        before, self._repeat_at = self._repeat_at, {}
        self._is_pending = False
        for finding in self._find():
            if finding.severity == Severity.NOTE or finding.kind in _WITHOUT_EVENT:
                continue
            key = finding.kind, finding.subject, finding.sentence
            is_urgent = Severity.of(finding.severity) is Severity.OPEN
            first = now if is_urgent else now + _SETTLE_SECONDS
            self._repeat_at[key] = due = before.get(key, first)
            self._is_pending |= now < due <= now + _SETTLE_SECONDS
            if due <= now and (event := self._event(finding)) is not None:
                self._repeat_at[key] = now + _REPEAT_SECONDS
                self._events.record(event)

    def _event(self, finding: Finding) -> PodEvent | None:
        """None for a pod that is gone."""
        reason = kinds.KINDS[finding.kind].reason
        what, _, name = finding.subject.partition(" ")
        if what == NODE:
            return PodEvent(None, reason, finding.sentence, action="Checking")
        if what == "namespace":
            return PodEvent(None, reason, finding.sentence, action="Checking", namespace=name)
        uids = [state.pod.uid for state in self._store.states() if state.pod.full_name == name]
        return PodEvent(uids[0], reason, finding.sentence, action="Checking") if uids else None

    async def refresh(self) -> None:
        self._current = self._find()

    def collect(self) -> Iterator[core.Metric]:
        counts = collections.Counter((one.severity, one.kind) for one in self._current)
        yield labelled(FINDINGS, sorted(counts.items()))
        present = {one.kind for one in self._current}
        yield labelled(
            GUARD_IN_FORCE,
            (
                ((name,), present.isdisjoint(kind.name for kind in missing))
                for name, missing in GUARDS.items()
                if name in self._guards()
            ),
        )
