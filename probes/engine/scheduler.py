"""All probes of a node on one event loop.

Each worker has one timer; there are no tasks and no threads. A pod's behaviour, or a failure in one
probe or callback, never affects another pod.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from probes.clock import boot_clock_ns
from probes.engine import passing, prober, queue, requests
from probes.engine.callbacks import Callbacks
from probes.engine.checks import Check, check_of
from probes.engine.lookup_use import Lookups
from probes.engine.requests import ProbeRequest
from probes.engine.slots import PodSlots, Slot, plan_of
from probes.engine.spreading import Spread
from probes.engine.targets import ProbedContainer, ProbedPod, ProbeKey, ProbeState, desired_probes
from probes.engine.workers import ContainerInstance, ProbeType, Worker, is_same_attempt
from probes.results import ProbeOutcome, ProbeResult

__all__ = ["Check", "ProbeKey", "ProbeState", "ProbedContainer", "ProbedPod", "Scheduler"]


class Scheduler:
    """Runs the probes of all pods set by `set_pod`. Create it on a running loop.

    on_result: called with the new result when the result that counts changes; not for the initial
    result of a new pod. on_probe: called for each finished probe, prober errors too (`error` is
    set: they are in none of the kubelet's counts). on_check: called for each finished check of an
    answered probe but prober errors. on_delay: called with the seconds between each probe's
    scheduled and actual start, if it connects. spread_seconds: first probes within this time after
    creation are spread evenly over it, for an agent that starts on a full node; others start at
    once.
    """

    def __init__(
        self,
        *,
        on_result: Callable[[ProbeKey, ProbeResult], None],
        on_probe: Callable[[ProbeKey, ProbeOutcome], None],
        on_check: Callable[[Check], None] | None = None,
        on_delay: Callable[[float], None] | None = None,
        max_in_flight: int = queue.MAX_IN_FLIGHT,
        spread_seconds: float = 0.0,
        starter: prober.Starter | None = None,
        wall_clock: Callable[[], float] = time.time,
        boot_clock_ns: Callable[[], int] = boot_clock_ns,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._callbacks = Callbacks(
            self._loop,
            on_result=on_result,
            on_probe=on_probe,
            on_check=on_check,
            on_delay=on_delay,
        )
        self.guarded = self._callbacks.guarded
        self._spread = Spread(self._loop.time, spread_seconds)
        self.starter: prober.Starter = starter or prober.Prober(self._loop)
        self._wall_clock = wall_clock
        self._boot_clock_ns = boot_clock_ns
        self._pods: dict[str, PodSlots] = {}
        self._due = queue.DueQueue(self._loop, self._start_due, max_in_flight=max_in_flight)
        self.lookups = Lookups(self, self._loop)
        self._closed = self._loop.create_future()

    @property
    def in_flight(self) -> int:
        """Number of running probes."""
        return self._due.in_flight

    @property
    def waiting(self) -> int:
        """Number of due probes delayed by the maximum."""
        return len(self._due)

    def targets(self) -> list[ProbedPod]:
        """The pods as they were set."""
        return [pod.target for pod in self._pods.values()]

    def set_pod(self, target: ProbedPod) -> None:
        """Add or update a pod; workers with an unchanged probe keep their state, and those with
        another one the result that counts (`Worker.change`).

        Raises ValueError for an invalid address. Calls on_result only for results that the update
        changes: a restarted container's.
        """
        pod = self._pods.get(target.uid)
        has_moved = pod is not None and not target.has_addresses_of(pod.target)
        if pod is not None and target != pod.target:
            self.lookups.doubt(target.uid)
        plans = {key: (probe, plan_of(probe, target)) for key, probe in desired_probes(target)}
        if pod is None:
            pod = self._pods[target.uid] = PodSlots(target)
        for existing in pod.slots.values():
            self.lookups.catch_up(existing)
        pod.target = target
        for key in [key for key in pod.slots if key not in plans]:
            self._drop(pod.slots.pop(key))
        for key, (probe, plan) in plans.items():
            slot = pod.slots.get(key)
            if slot is None:
                worker = Worker(key.type, probe, first_at=self._spread.next())
                pod.slots[key] = Slot(key, worker, plan, target.netns, target.netns_id)
                continue
            is_same = is_same_attempt(slot.worker.probe, probe)
            if slot.netns != target.netns or has_moved or not is_same:
                self._stop_run(slot)
                slot.plan, slot.netns = plan, target.netns
                self.lookups.drop(slot)
            elif not slot.plan.has_certificate_of(plan):
                had_none, slot.plan = bool(slot.plan.certificate_problem), plan
                if had_none and plan.certificate is not None:
                    self.trigger_slot(slot)
            if slot.netns_id != target.netns_id:
                slot.netns_id = target.netns_id
                self.lookups.drop(slot)
            if slot.worker.probe != probe:
                slot.worker.change(probe, self._loop.time())
        self._observe(pod)

    def remove_pod(self, uid: str) -> None:
        """Stop a pod's probes; no callback is called for it any more."""
        pod = self._pods.pop(uid, None)
        if pod is not None:
            for slot in pod.slots.values():
                self._drop(slot)

    def trigger(
        self, uid: str, container: str | None = None, type: ProbeType | None = None
    ) -> None:
        """Probe now, before others that are due: all of the pod, of a container, or of one type."""
        pod = self._pods.get(uid)
        for key, slot in pod.slots.items() if pod else ():
            if container in (None, key.container) and type in (None, key.type):
                self.trigger_slot(slot)

    def trigger_on_close(self, key: ProbeKey) -> None:
        """Probe now, since the listener is closed (see Worker.trigger_on_close)."""
        if slot := self._slot(key):
            self.lookups.catch_up(slot)
            slot.worker.trigger_on_close(self._loop.time())
            self._arm_urgent(slot)

    def due_probes(self, uid: str, port: int) -> list[ProbeRequest]:
        """The startup and readiness probes of a pod that dial this port."""
        return requests.of_port(self.slots(uid), port)

    def snapshot(self, uid: str | None = None) -> list[ProbeState]:
        """A pod's probes as they are now, or all pods', in order of their keys."""
        now = self._loop.time()
        slots = sorted(self.slots(uid), key=lambda slot: slot.key)
        for slot in slots:
            self.lookups.catch_up(slot)
        return [slot.status(now) for slot in slots]

    def results(self, uid: str) -> dict[ProbeKey, ProbeResult]:
        """The results of a pod that count now."""
        pod = self._pods.get(uid)
        return {
            key: slot.worker.cached
            for key, slot in (pod.slots.items() if pod else ())
            if slot.worker.cached is not None
        }

    def passing(self, uid: str) -> tuple[bool, str, str]:
        """Whether the pod's probes pass: probes.engine.passing.passing."""
        return passing.passing(self._pods.get(uid))

    async def run(self) -> None:
        """Wait until aclose(); cancelled, close."""
        try:
            await asyncio.shield(self._closed)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Stop all probes. Nothing is called any more."""
        if self._closed.done():
            return
        self._closed.set_result(None)
        for uid in tuple(self._pods):
            self.remove_pod(uid)
        self.lookups.close()
        self.starter.close()

    def slots(self, uid: str | None = None) -> list[Slot]:
        """Of a pod, or of all."""
        uids = self._pods if uid is None else self._pods.keys() & {uid}
        return [slot for each in uids for slot in self._pods[each].slots.values()]

    def _slot(self, key: ProbeKey) -> Slot | None:
        pod = self._pods.get(key.uid)
        return pod.slots.get(key) if pod else None

    def _observe(self, pod: PodSlots) -> None:
        """Pass the containers' state to the workers; startup decides for the other types."""
        now = self._loop.time()
        for target in pod.target.containers:
            name = target.probes.name
            started_at = pod.starts.on_loop(target, wall=self._wall_clock(), loop=now)
            container = ContainerInstance(
                target.container_id, started_at, target.running, target.restarts
            )
            if container.running and pod.has_started(target):
                pod.starts.record(target)
            # Startup is first in a container's slots: the others use its result.
            for type in ProbeType:
                slot = pod.slots.get(ProbeKey(pod.target.uid, name, type))
                if slot is None:
                    continue
                self.lookups.catch_up(slot)
                worker = slot.worker
                if worker.container_id not in ("", container.container_id):
                    # The outcome and the running probe belong to the old container.
                    self._stop_run(slot)
                    slot.outcome = None
                    self.lookups.drop(slot)
                before = worker.cached
                started = pod.has_started(target)
                if type is ProbeType.STARTUP and worker.probe.answered:
                    # The kubelet reads results until one is its own.
                    started = target.started_by_kubelet
                worker.observe(
                    container,
                    started=started,
                    deleting=pod.target.deleting,
                    now=now,
                    restored=pod.restored(target, type),
                )
                if worker.over:
                    self._stop_run(slot)
                self.arm(slot)
                if before is not None:
                    self._report(slot, before)

    def arm(self, slot: Slot) -> None:
        """Set the timer to when the worker's next probe is due."""
        due = slot.worker.due
        if slot.timer is not None:
            if due == slot.due:
                return
            slot.timer.cancel()
            slot.timer = None
        if slot.waiting:
            slot.waiting = due is not None
            return
        if due is not None:
            slot.due = due
            lookup = self.lookups.arm(slot, due)
            slot.timer = lookup or self._loop.call_at(due, self.fire, slot)

    def _arm_urgent(self, slot: Slot) -> None:
        """Start the next probe before those of others that are due."""
        slot.is_urgent = True
        if slot.waiting:
            self._due.hurry(slot)
        else:
            self.arm(slot)

    def check_lookup(self, slot: Slot) -> None:
        """As of `SlotOwner`, as the next two."""
        if slot.outcome is not None:
            slot.started_ns = self._boot_clock_ns()
            self.guarded(self._callbacks.on_check, check_of(slot, slot.outcome, slot.started_ns))

    def trigger_slot(self, slot: Slot) -> None:
        self.lookups.catch_up(slot)
        slot.worker.trigger(self._loop.time())
        self._arm_urgent(slot)

    def fire(self, slot: Slot) -> None:
        slot.timer = None
        self._due.add(slot)

    def _start_due(self, slot: Slot) -> None:
        self.guarded(self._callbacks.on_delay, max(0.0, self._loop.time() - slot.due))
        self._start_run(slot)

    def _start_run(self, slot: Slot) -> None:
        slot.worker.start(self._loop.time())
        if slot.worker.probe.answered:
            slot.started_ns = self._boot_clock_ns()
        try:
            run = self.starter.start(slot.plan, slot.netns, partial(self._finished, slot))
        except Exception as error:
            message = f"the prober failed: {error!r}"
            self._finished(slot, ProbeOutcome(ProbeResult.UNKNOWN, message, error=True))
        else:
            # Most tcp probes have finished by now, and the next may have started.
            if slot.worker.in_flight and slot.run is None:
                slot.run = run

    def _finished(self, slot: Slot, outcome: ProbeOutcome) -> None:
        slot.run = None
        worker = slot.worker
        before = worker.cached
        if worker.finish(outcome, self._loop.time()):
            self._start_run(slot)
            return
        self._due.release()
        outcome = slot.record(outcome)
        self.lookups.connected(slot, outcome)
        self.arm(slot)
        if worker.type is ProbeType.STARTUP and worker.cached is not before:
            pod = self._pods.get(slot.key.uid)
            if pod is not None:
                self._observe(pod)
        self.guarded(self._callbacks.on_probe, slot.key, outcome)
        is_verdict = not outcome.error and not slot.plan.is_unknown
        if worker.probe.answered and is_verdict:
            self.guarded(self._callbacks.on_check, check_of(slot, outcome, self._boot_clock_ns()))
        self._report(slot, before)

    def _report(self, slot: Slot, before: ProbeResult | None) -> None:
        cached = slot.worker.cached
        if cached is None or cached is before:
            return
        # A callback may have removed the pod.
        pod = self._pods.get(slot.key.uid)
        if pod is not None and pod.slots.get(slot.key) is slot:
            self.guarded(self._callbacks.on_result, slot.key, cached)

    def _stop_run(self, slot: Slot) -> None:
        if slot.worker.in_flight:
            if slot.run is not None:
                slot.run.cancel()
                slot.run = None
            self._due.release()
            slot.worker.abandon()
            self.arm(slot)

    def _drop(self, slot: Slot) -> None:
        """Remove a slot's worker."""
        self._stop_run(slot)
        self.lookups.drop(slot)
        slot.worker.over = True
        slot.waiting = False
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
