"""The condition `podgate.io/policy-ready`: whether the cluster's network policies are in force for
a new pod, found by packets between the pod and the node's witness.

The witness is a pod of podgate's own namespace on the pods' network, one on each node. From its
network namespace the agent sends what the policies must drop and what they must admit, and sees at
the pod what arrives; for egress the other way round.

Once True for a sandbox the condition stays so, as `isolation-ready` does: an engine that fails
later would otherwise take all pods out of their services. While anything is missing it is False,
and after the time-out what the owner has chosen happens; either is a finding then.
"""

import asyncio
import pathlib
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from prometheus_client import core

from agent import labels, state_files, tasks
from agent.backoff import Backoff
from agent.kube.objects import PodCondition
from agent.logs import Event
from agent.metrics import MetricFamily, counter, histogram
from agent.network_policy import outcomes, pod_check
from agent.network_policy.outcomes import Outcome
from agent.network_policy.source import NetworkPolicies
from agent.pods.changes import Subscription
from agent.pods.conditions import FALSE, TRUE
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.probing.result_store import sandbox_of
from agent.settings import PolicyReadyMode, PolicyReadySettings
from agent.state_files import StateSaver
from probes.netns import Netns

# A check that finds nothing takes a second, and a handful of descriptors meanwhile.
_AT_ONCE: Final = 64
_SAVE_SECONDS: Final = 0.5
_BASE_SECONDS, _CAP_SECONDS = 0.1, 1.0
_LATE_SECONDS: Final = 10.0
_BUCKETS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

CHECKS = MetricFamily(
    "podgate_policy_checks_total",
    "counter",
    "Checks of whether network policies are in force for a new pod, by what they found.",
    ("reason",),
)
READY_SECONDS = MetricFamily(
    "podgate_policy_ready_seconds",
    "histogram",
    "Time from the network of a new pod to its condition policy-ready.",
)


class _Ready(msgspec.Struct, frozen=True):
    """A sandbox for which the condition has become True."""

    sandbox: str
    outcome: Outcome


class _Saved(msgspec.Struct):
    """The file's content, by uid."""

    ready: dict[str, _Ready]


class PolicyReadiness:
    """Publishes the condition of each pod that has it as a readiness gate. For the event loop."""

    def __init__(
        self,
        settings: PolicyReadySettings,
        policies: NetworkPolicies | None,
        *,
        store: PodStore,
        object_labels: ObjectLabels,
        namespace: str,
        state: pathlib.Path,
        reported: Callable[[str], PodCondition | None] = lambda uid: None,
    ) -> None:
        """policies: None where checks are off; namespace: the witness's; state: the file that keeps
        results across restarts of the agent; reported: the API server's condition of a pod, by uid,
        if it is True of the pod's current sandbox; for a pod that the file lacks."""
        self._settings = settings
        self._policies = policies
        self._store = store
        self._labels = object_labels
        self._namespace = namespace
        self._changes = Subscription()
        store.desired.subscribe(self._changes)
        store.in_force.subscribe(self._changes)
        self._running: dict[str, tuple[Netns, asyncio.Task[None]]] = {}
        self._ready: dict[str, _Ready] = {}
        self._settled: dict[str, tuple[Netns, Outcome]] = {}
        """With what a sandbox became ready, by uid."""
        self._witness: tuple[object, ...] = ()
        """What was last seen of it: a change is worth another try."""
        self._state = state
        self._reported = reported
        self._saver = StateSaver(
            state,
            self._content,
            failure=Event.POLICY_READINESS_NOT_SAVED,
            settle_seconds=_SAVE_SECONDS,
        )
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._again = asyncio.Event()
        """Set, and replaced, when policies or the witness change."""
        self._checks = counter(CHECKS)
        self._seconds = histogram(READY_SECONDS, _BUCKETS)

    def collect(self) -> Iterator[core.Metric]:
        yield from self._checks.collect()
        yield from self._seconds.collect()

    async def run(self) -> None:
        """Check until cancelled."""
        await asyncio.to_thread(self._restore)
        self._running.clear()
        for uid in self._store.pods:
            self._changes.mark(uid)
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "saved policy readiness", self._saver.run)
            if self._policies:
                tasks.start(group, "policies to try", self._policies.run)
                tasks.start(group, "changes of policies", self._follow_policies)
            while True:
                for uid in await self._changes.next():
                    self._update(uid, group)

    def _restore(self) -> None:
        saved = state_files.read(
            self._state, _Saved, failure=Event.SAVED_POLICY_READINESS_UNREADABLE
        )
        if saved is not None:
            self._ready = saved.ready | self._ready
        if self._policies:
            self._policies.restore()

    def _content(self) -> _Saved:
        """Without pods that ended while no agent ran, once the node's pods are all there."""
        if self._store.is_synced:
            self._ready = {
                uid: found for uid, found in self._ready.items() if uid in self._store.pods
            }
        return _Saved(dict(self._ready))

    async def _follow_policies(self) -> None:
        assert self._policies is not None
        while True:
            await self._policies.changed.wait()
            self._policies.changed.clear()
            self._try_again()

    def _try_again(self) -> None:
        self._again.set()
        self._again = asyncio.Event()

    def _update(self, uid: str, group: asyncio.TaskGroup) -> None:
        state = self._store.get(uid)
        if state is not None and self._is_witness(state):
            seen = uid, state.netns, state.claims.confirmed
            if seen != self._witness:
                self._witness = seen
                self._try_again()
        if state is None or state.pod.is_deleting or not state.pod.awaits_policies:
            self._stop(uid)
            if state is None:
                self._forget(uid)
            elif not state.pod.awaits_policies:
                self._store.conditions.remove(uid, labels.POLICY_READY)
            return
        if state.pod.host_network:
            self._publish(state, outcomes.NETWORK_OF_HOST)
        elif found := self._found(uid, state.netns):
            self._stop(uid)
            self._publish(state, found)
        elif state.netns is None or not state.claims.confirmed:
            self._stop(uid)
            if not self._awaits_netns(state):
                text = "The pod has no address yet."
                self._publish(state, Outcome(outcomes.PENDING, text))
        elif self._policies is None:
            self._publish(state, outcomes.NOT_CHECKED)
        elif self._running.get(uid, (None,))[0] != state.netns:
            self._stop(uid)
            task = group.create_task(
                self._check(state, state.netns), name=f"policies of {state.pod.full_name}"
            )
            self._running[uid] = state.netns, task

    def _awaits_netns(self, state: PodState) -> bool:
        """Whether the file has the pod, and its network namespace will show of which sandbox: not
        to be False meanwhile."""
        has_sandbox = state.netns is None and state.pod.netns_path is not None
        return has_sandbox and state.pod.uid in self._ready

    def _found(self, uid: str, netns: Netns | None) -> Outcome | None:
        """With what the sandbox became ready, for this agent or a previous one."""
        settled = self._settled.get(uid)
        if settled and settled[0] == netns:
            return settled[1]
        found = self._found_before(uid, netns)
        if netns and found:
            self._settled[uid] = netns, found
        return found

    def _found_before(self, uid: str, netns: Netns | None) -> Outcome | None:
        ready = self._ready.get(uid)
        if netns and ready and ready.sandbox == sandbox_of(netns):
            return ready.outcome
        if condition := self._reported(uid):
            return Outcome(condition.reason, condition.message)
        return None

    def _stop(self, uid: str) -> None:
        if running := self._running.pop(uid, None):
            running[1].cancel()

    def _forget(self, uid: str) -> None:
        self._settled.pop(uid, None)
        if self._ready.pop(uid, None):
            self._saver.mark()

    def _is_witness(self, state: PodState) -> bool:
        return (
            not state.pod.is_deleting
            and not state.pod.host_network
            and state.pod.namespace == self._namespace
            and state.pod.labels.get(labels.NAME) == labels.WITNESS_NAME
        )

    def _is_ready_witness(self, state: PodState) -> bool:
        return self._is_witness(state) and bool(state.netns and state.claims.confirmed)

    async def _check(self, state: PodState, netns: Netns) -> None:
        """Until the policies are in force, or the owner does not want to wait any longer."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        pace = Backoff(base_seconds=_BASE_SECONDS, cap_seconds=_CAP_SECONDS)
        while True:
            again = self._again
            outcome = await self._try(state)
            is_late = loop.time() - started >= self._settings.timeout_seconds
            if is_late and not outcome.is_ready:
                outcome = self._late(outcome)
            self._checks.labels(outcome.reason).inc()
            if outcome.is_ready:
                break
            self._publish(state, outcome if is_late else _pending(outcome))
            seconds = _LATE_SECONDS if is_late else pace.next_seconds()
            try:
                async with asyncio.timeout(seconds):
                    await again.wait()
            except TimeoutError:
                pass
        self._seconds.observe(loop.time() - started)
        uid = state.pod.uid
        self._settled[uid] = netns, outcome
        self._ready[uid] = _Ready(sandbox_of(netns), outcome)
        self._saver.mark()
        self._publish(state, outcome)

    async def _try(self, state: PodState) -> Outcome:
        assert self._policies is not None
        try:
            async with self._slots:
                witness = next(filter(self._is_ready_witness, self._store.states()), None)
                return await pod_check.check(state, witness, self._policies, self._labels)
        except OSError as error:
            return Outcome(outcomes.FAILED, f"The check failed: {error.strerror or error}.")

    def _late(self, outcome: Outcome) -> Outcome:
        if self._settings.mode is not PolicyReadyMode.READY:
            return outcome
        limit = f"{self._settings.timeout_seconds:g} s"
        text = f"Not confirmed within {limit} (--policy-ready=ready): {outcome.message}"
        return Outcome(outcomes.UNCONFIRMED, text)

    def _publish(self, state: PodState, outcome: Outcome) -> None:
        if self._store.get(state.pod.uid) is state:
            status = TRUE if outcome.is_ready else FALSE
            self._store.conditions.set(
                *(state.pod, labels.POLICY_READY, status, outcome.reason, outcome.message)
            )


def _pending(outcome: Outcome) -> Outcome:
    return Outcome(outcomes.PENDING, outcome.message)
