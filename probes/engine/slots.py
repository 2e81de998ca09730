"""The scheduler's state: one slot for each probe that it runs, and the slots of one pod."""

import asyncio
from typing import TYPE_CHECKING

import msgspec

from probes.engine import prober
from probes.engine.container_starts import ContainerStarts
from probes.engine.joint import Cancellable
from probes.engine.targets import ProbedContainer, ProbedPod, ProbeKey, ProbeState
from probes.engine.workers import ProbeType, Worker
from probes.netns import Netns
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.definitions import Probe

if TYPE_CHECKING:
    from probes.engine.lookup_groups import SlotLookup


def plan_of(probe: Probe, target: ProbedPod) -> prober.ProbePlan:
    """What each run of a pod's probe does."""
    return prober.plan(probe, target.addresses, target.interfaces, target.certificates)


MESSAGE_MAX_CHARS = 1024
"""How much of an outcome's text is kept (the kubelet cuts Events at the same length)."""


class Slot:
    """One worker, with its timer, its run and its counts."""

    __slots__ = (
        "due",
        "errors",
        "failed",
        "is_doubted",
        "is_urgent",
        "key",
        "lookup",
        "netns",
        "netns_id",
        "outcome",
        "passed",
        "plan",
        "run",
        "started_ns",
        "timer",
        "waiting",
        "worker",
    )

    def __init__(
        self,
        key: ProbeKey,
        worker: Worker,
        plan: prober.ProbePlan,
        netns: Netns,
        netns_id: int | None = None,
    ) -> None:
        self.key = key
        self.worker = worker
        self.plan = plan
        self.netns = netns
        self.netns_id = netns_id
        self.lookup: SlotLookup | None = None
        """None until the probe has passed, and for probes that always connect."""
        self.is_doubted = False
        """The pod has changed during the connection in flight, so lookups cannot repeat it."""
        self.timer: asyncio.TimerHandle | SlotLookup | None = None
        self.run: Cancellable | None = None
        self.started_ns = 0
        """Start of the newest run of an answered probe, on CLOCK_BOOTTIME."""
        self.due = 0.0
        self.waiting = False
        """Due, and delayed by the maximum."""
        self.is_urgent = False
        """The next probe is started before those of others that are due."""
        self.outcome: ProbeOutcome | None = None
        self.passed = self.failed = self.errors = 0

    def record(self, outcome: ProbeOutcome) -> ProbeOutcome:
        """Count the outcome of a run, and keep it with a text that is not too long; returns it."""
        if len(outcome.message) > MESSAGE_MAX_CHARS:
            short = outcome.message[: MESSAGE_MAX_CHARS - 3] + "..."
            outcome = msgspec.structs.replace(outcome, message=short)
        self.outcome = outcome
        if outcome.error:
            self.errors += 1
        elif outcome.passed:
            self.passed += 1
        else:
            self.failed += 1
        return outcome

    def status(self, now: float) -> ProbeState:
        """The probe's state at `now`, on the loop's clock."""
        worker = self.worker
        return ProbeState(
            key=self.key,
            result=worker.cached,
            outcome=self.outcome,
            streak=worker.streak,
            passed=self.passed,
            failed=self.failed,
            errors=self.errors,
            in_flight=worker.in_flight,
            is_paused=worker.is_paused,
            due_in_seconds=None if worker.due is None else worker.due - now,
            lookups_differ=self.lookup is not None and self.lookup.differs,
        )


class PodSlots:
    """A pod as last set, and its probes."""

    __slots__ = ("slots", "starts", "target")

    def __init__(self, target: ProbedPod) -> None:
        self.target = target
        self.slots: dict[ProbeKey, Slot] = {}
        self.starts = ContainerStarts()

    def has_started(self, container: ProbedContainer) -> bool:
        """Whether this run of the container has started, so that its other probes run."""
        if container.started is not None:
            return container.started
        slot = self.slots.get(ProbeKey(self.target.uid, container.probes.name, ProbeType.STARTUP))
        if slot is None:
            # It has no startup probe, or one that the kubelet runs and whose result is unknown.
            return True
        if self.starts.has(container):
            return True
        worker = slot.worker
        if not worker.container_id:
            return container.restored.get(ProbeType.STARTUP) is ProbeResult.SUCCESS
        is_same_run = worker.container_id == container.container_id
        return worker.cached is ProbeResult.SUCCESS and is_same_run

    def restored(self, container: ProbedContainer, type: ProbeType) -> ProbeResult | None:
        """The result that a new worker begins with, in place of the initial one."""
        if type is ProbeType.STARTUP and self.starts.has(container):
            return ProbeResult.SUCCESS
        return container.restored.get(type)
