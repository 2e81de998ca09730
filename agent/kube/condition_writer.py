"""Writes pod conditions to the API server: one patch per change, rate limited per pod and per node.

`set_pod` records what the API has, `enqueue` that the pod's conditions may have changed. If the two
differ, the pod is patched with its newest conditions, whatever happened before. So nothing is sent
at rest, other clients' changes are corrected, and after an outage each changed pod costs one PATCH.

* Node: a token bucket. While the API server is unreachable, one pod tries for all, with back-off.
* Pod: a small bucket, for probes that flap and for other writers of the same conditions.
* Where the API server fails to write one pod only, no other waits (agent/kube/write_failures.py).
* A change that does not affect readiness waits longer: while one condition of a starting pod is
  False, the others are not urgent.
* `isolation-ready` is sent by itself as soon as it is True, before the changes of other pods: the
  kubelet reports Ready together with ContainersReady only if it has the condition by then, else up
  to 1.4 s later.
* A change of text only (each failing probe reports its duration) is sent once a minute. Neither it
  nor the reason that a restarted relay changes for seconds is sent before it has lasted for 10 s.
* Conditions of deleted sandboxes go first, also where only the text differs, which names the
  sandbox: they report Ready for a pod that is not checked yet.
  They get 2 s to become true of the new sandbox: the kubelet considers a False that is written for
  a moment up to a second later, when it is wrong.
"""

import asyncio
import collections
import enum
import random
from collections.abc import Callable, Iterable

import msgspec
import structlog

from agent import backoff
from agent.kube import objects, patches, responses
from agent.kube.client import STRATEGIC_MERGE, ApiClient, ApiError
from agent.kube.objects import ApiPod
from agent.kube.patches import Difference, SandboxStamp
from agent.kube.write_failures import TICK_SECONDS, WriteFailures
from agent.logs import Event
from agent.pods.conditions import TYPES, Condition

log = structlog.get_logger(__name__)

# The kubelet's own defaults for its requests (kubeAPIQPS, kubeAPIBurst).
_PATCHES_PER_SECOND = 50.0
_BURST = 100
_AT_ONCE = 8
_PER_POD_PER_SECOND = 0.1
_PER_POD_BURST = 4
_TEXT_SECONDS = 60.0
# Sandbox, gate, container and first probe follow each other; most pods start within this.
_SETTLE_SECONDS = 3.0
# After a reboot eight pods are gated within 0.7 s of the agent's start.
_STALE_SECONDS = 2.0
# A relay that was killed is back after its first back-offs.
_LASTING_SECONDS = 10.0
_PATCH_SECONDS = 10.0
_REJECTED_BASE_SECONDS, _REJECTED_CAP_SECONDS = 5.0, 300.0
# Of a pod that others outlast: sooner than after a rejection, which may need a change of the pod.
_FAILING_CAP_SECONDS = 30.0
# A patch of theirs may take all of _PATCH_SECONDS.
_FAILING_AT_ONCE = 2


class _Urgency(enum.IntEnum):
    """Which of the patches that are due goes first."""

    STALE = 0
    ISOLATED = 1
    OTHER = 2


class _PodWrites:
    """A pod in the API, and the state of its patches."""

    def __init__(self, actual: ApiPod, jitter: backoff.Jitter) -> None:
        self.actual = actual
        self.is_replaced = False
        self.is_in_flight = False
        self.text_at = 0.0
        """When a change of text only may be sent."""
        self.differs_since: float | None = None
        """Since when the API's conditions are not up to date."""
        self.urgency = _Urgency.OTHER
        self.stale_since: float | None = None
        """Since when a condition in the API is about a deleted sandbox."""
        self.starts_when_corrected = False
        """Whether the pod's containers wait until no such condition is left."""
        self.not_before = 0.0
        """When to retry after a rejection."""
        self.rejection = ""
        """Why the API server rejects this pod's patch; empty if it does not."""
        self.bucket = backoff.Bucket(per_second=_PER_POD_PER_SECOND, burst=_PER_POD_BURST)
        self.backoff = backoff.Backoff(
            base_seconds=_REJECTED_BASE_SECONDS, cap_seconds=_REJECTED_CAP_SECONDS, jitter=jitter
        )


class ConditionWriter:
    """Keeps the API's conditions of this node's pods up to date. For the event loop."""

    def __init__(
        self,
        api: ApiClient,
        *,
        conditions_of: Callable[[str], Iterable[Condition]],
        sandbox_of: Callable[[str], str],
        boot: str,
        is_withdrawn: Callable[[str, str], bool],
        writes_all: bool = False,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """conditions_of: a pod's current conditions, by uid; sandbox_of: the name of its sandbox,
        empty if unknown; boot: the kernel's boot id; writes_all: podgate's own also for pods
        without a readiness gate of podgate; is_withdrawn: whether a condition of another owner, by
        uid and type, that podgate has written is to be removed.
        """
        self.patches_by_code = collections.Counter[str]()
        """Patches sent, by status code of the response; "none" without a response."""
        self._api = api
        self._conditions_of = conditions_of
        self._sandbox_of = sandbox_of
        self._boot = boot
        self._writes_all = writes_all
        self._is_withdrawn = is_withdrawn
        self._jitter = jitter
        self._pods: dict[str, _PodWrites] = {}
        self._due: dict[str, float] = {}
        self._in_flight = 0
        self._failing_in_flight = 0
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._bucket = backoff.Bucket(per_second=_PATCHES_PER_SECOND, burst=_BURST)
        self._failures = WriteFailures(jitter)

    @property
    def problem(self) -> str:
        """Why conditions that are to be written cannot be; empty while writes succeed, and while
        there is nothing to write, such as after the only pod that failed was deleted."""
        return self._failures.problem if self.pending else ""

    @property
    def pending(self) -> int:
        """Number of pods whose conditions in the API are not up to date."""
        return len(self._due) + self._in_flight

    @property
    def oldest_pending_seconds(self) -> float:
        """For how long the API's conditions of some pod have not been up to date."""
        now = asyncio.get_running_loop().time()
        waiting = (
            pod.differs_since for pod in self._pods.values() if pod.differs_since is not None
        )
        return max((now - since for since in waiting), default=0.0)

    def set_pod(self, actual: ApiPod) -> None:
        """Record the API's version of a pod."""
        pod = self._pods.get(actual.uid)
        if pod is None or pod.actual.metadata.uid != actual.metadata.uid:
            self._pods[actual.uid] = _PodWrites(actual, self._jitter)
        elif objects.is_not_newer(
            actual.metadata.resource_version, pod.actual.metadata.resource_version
        ):
            return
        else:
            pod.actual = actual
        self.enqueue(actual.uid)

    def enqueue(self, uid: str) -> None:
        """A pod's conditions, or its sandbox, may have changed."""
        pod = self._pods.get(uid)
        if pod is None or pod.is_replaced or pod.is_in_flight:
            return
        desired = self._desired(uid, pod)
        found = self._difference(uid, pod, desired)
        if found is Difference.NONE:
            self._due.pop(uid, None)
            pod.differs_since = pod.stale_since = None
            self._written.set()
            return
        now = asyncio.get_running_loop().time()
        if pod.differs_since is None:
            pod.differs_since = now
        due = max(now + pod.bucket.seconds_until_next(), pod.not_before)
        pod.urgency = self._urgency(uid, pod, desired)
        if pod.urgency is _Urgency.STALE:
            pod.stale_since = now if pod.stale_since is None else pod.stale_since
            if patches.may_become_true(desired) and not pod.starts_when_corrected:
                due = max(due, pod.stale_since + _STALE_SECONDS)
        else:
            pod.stale_since = None
        if found is Difference.TEXT and pod.urgency is not _Urgency.STALE:
            due = max(due, pod.text_at)
        if pod.urgency is _Urgency.OTHER and found is not Difference.STATE:
            due = max(due, pod.differs_since + _LASTING_SECONDS)
        elif pod.urgency is _Urgency.OTHER and not patches.changes_readiness(pod.actual, desired):
            due = max(due, pod.differs_since + _SETTLE_SECONDS)
        self._due[uid] = due
        self._wake.set()

    async def correct(self, uid: str) -> None:
        """Write the pod's conditions at once if some are of a deleted sandbox, and wait until none
        is left; for a pod of which no container has started, so that what is False now is not
        wrong a moment later. Cancelled if the API server takes too long."""
        pod = self._pods.get(uid)
        if pod is None:
            return
        pod.starts_when_corrected = True
        try:
            self.enqueue(uid)
            while self._pods.get(uid) is pod and not pod.is_replaced and self._is_stale(uid, pod):
                self._written.clear()
                await self._written.wait()
        finally:
            pod.starts_when_corrected = False

    def enqueue_all(self) -> None:
        """Any pod's conditions may have changed."""
        for uid in list(self._pods):
            self.enqueue(uid)

    def forget(self, uid: str) -> None:
        """The pod was deleted."""
        self._pods.pop(uid, None)
        self._due.pop(uid, None)
        self._failures.forget(uid)
        self._written.set()

    async def run(self) -> None:
        """Write until cancelled."""
        slots = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                await self._bucket.wait()
                uid, pod = await self._next()
                pod.is_in_flight = True
                self._in_flight += 1
                is_failing = self._failures.is_failing(uid)
                self._failing_in_flight += is_failing
                task = group.create_task(
                    self._write(uid, pod, is_failing=is_failing), name=f"conditions of {uid}"
                )
                task.add_done_callback(lambda _: slots.release())

    async def _next(self) -> tuple[str, _PodWrites]:
        """Wait until a pod is due, and dequeue it."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            now = loop.time()
            times = self._times()
            # A timer's rounding must not make this a busy loop.
            ready = [uid for uid, at in times.items() if at <= now + TICK_SECONDS]
            # While writes fail, one pod tries for all.
            may_write = not (self._failures.problem and self._in_flight)
            if ready and may_write:
                uid = min(ready, key=self._order)
                del self._due[uid]
                return uid, self._pods[uid]
            wait = min(times.values()) - now if times and may_write else None
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _times(self) -> dict[str, float]:
        """When each pod may be written, by uid; without pods that have to wait for others."""
        has_slot = self._failing_in_flight < _FAILING_AT_ONCE
        return {
            uid: max(due, self._failures.resume_at(uid))
            for uid, due in self._due.items()
            if has_slot or not self._failures.is_failing(uid)
        }

    def _order(self, uid: str) -> tuple[tuple[bool, bool], _Urgency, float]:
        """The pod with the least is written first."""
        return self._failures.order(uid), self._pods[uid].urgency, self._due[uid]

    async def _write(self, uid: str, pod: _PodWrites, *, is_failing: bool) -> None:
        try:
            await self._patch(uid, pod)
        finally:
            pod.is_in_flight = False
            self._in_flight -= 1
            self._failing_in_flight -= is_failing
            self._wake.set()
            self._written.set()
            if self._pods.get(uid) is pod:
                self.enqueue(uid)

    async def _patch(self, uid: str, pod: _PodWrites) -> None:
        conditions = self._desired(uid, pod)
        if self._difference(uid, pod, conditions) is Difference.NONE:
            return
        pod.bucket.take()
        pod.differs_since = None
        try:
            content = await self._api.request(
                "PATCH",
                patches.path(pod.actual),
                body=patches.body(pod.actual, conditions, self._withdrawn(uid, pod)),
                content_type=STRATEGIC_MERGE,
                timeout_seconds=_PATCH_SECONDS,
            )
        except ApiError as error:
            self.patches_by_code[str(error.code or "none")] += 1
            self._handle_error(error, uid, pod)
        else:
            self.patches_by_code["200"] += 1
            self._mark_healthy(uid, pod)
            self._handle_response(content, pod, conditions)

    def _desired(self, uid: str, pod: _PodWrites) -> tuple[objects.PodCondition, ...]:
        now = SandboxStamp(self._sandbox_of(uid), self._boot)
        own = self._conditions_of(uid)
        return patches.desired_conditions(pod.actual, own, now, kinds=self._kinds(pod))

    def _kinds(self, pod: _PodWrites) -> tuple[str, ...]:
        """podgate's own conditions that are written for this pod."""
        is_gated = not pod.actual.gates.isdisjoint(TYPES)
        return TYPES if is_gated or self._writes_all else ()

    def _withdrawn(self, uid: str, pod: _PodWrites) -> list[str]:
        """Types of other owners' conditions that are to be removed from the API."""
        written = patches.written_for_others(pod.actual)
        return [one.type for one in written if self._is_withdrawn(uid, one.type)]

    def _difference(
        self, uid: str, pod: _PodWrites, desired: tuple[objects.PodCondition, ...]
    ) -> Difference:
        found = patches.difference(pod.actual, desired)
        return Difference.STATE if self._withdrawn(uid, pod) else found

    def _urgency(
        self, uid: str, pod: _PodWrites, desired: tuple[objects.PodCondition, ...]
    ) -> _Urgency:
        if self._is_stale(uid, pod):
            return _Urgency.STALE
        return _Urgency.ISOLATED if patches.isolates(pod.actual, desired) else _Urgency.OTHER

    def _is_stale(self, uid: str, pod: _PodWrites) -> bool:
        """Whether a condition in the API is about a deleted sandbox."""
        stamp = SandboxStamp(self._sandbox_of(uid), self._boot)
        actual = [
            condition for kind in self._kinds(pod) if (condition := pod.actual.condition(kind))
        ]
        others = [
            one
            for one in patches.written_for_others(pod.actual)
            if not self._is_withdrawn(uid, one.type)
        ]
        return any(patches.is_stale(condition, stamp) for condition in (*actual, *others))

    def _handle_response(
        self, content: bytes, pod: _PodWrites, conditions: tuple[objects.PodCondition, ...]
    ) -> None:
        """Record what the API has now: the watch reports it later, after older versions."""
        try:
            response = responses.decode(content, ApiPod)
        except msgspec.DecodeError as error:
            log.warning(
                Event.PATCH_RESPONSE_INVALID,
                pod=pod.actual.metadata.full_name,
                error=str(error),
            )
            pod.not_before = asyncio.get_running_loop().time() + pod.backoff.next_seconds()
            return
        before = pod.actual.metadata.resource_version
        if not objects.is_not_newer(response.metadata.resource_version, before):
            pod.actual = response

    def _mark_healthy(self, uid: str, pod: _PodWrites) -> None:
        now = asyncio.get_running_loop().time()
        pod.text_at = now + _TEXT_SECONDS
        pod.backoff.reset()
        pod.rejection = ""
        if self._failures.problem:
            log.info(Event.CONDITION_WRITES_RESUMED, pending=len(self._due))
        self._failures.succeed(uid, now)

    def _handle_error(self, error: ApiError, uid: str, pod: _PodWrites) -> None:
        now = asyncio.get_running_loop().time()
        had_problem = bool(self._failures.problem)
        if patches.is_pod_replaced(error):
            pod.is_replaced = True
            log.info(Event.CONDITION_POD_DELETED, pod=pod.actual.metadata.full_name)
        elif not error.is_transient:
            self._handle_rejection(error, pod, now + pod.backoff.next_seconds())
        elif not self._failures.fail(uid, error, now):
            seconds = min(pod.backoff.next_seconds(), _FAILING_CAP_SECONDS)
            self._handle_rejection(error, pod, now + max(seconds, error.retry_after_seconds))
        elif not had_problem:
            log.warning(Event.CONDITION_WRITES_FAILING, error=str(error), code=error.code)

    def _handle_rejection(self, error: ApiError, pod: _PodWrites, retry_at: float) -> None:
        if pod.rejection != str(error):
            log.error(
                Event.CONDITION_WRITE_REJECTED,
                pod=pod.actual.metadata.full_name,
                error=str(error),
                code=error.code,
            )
        pod.rejection = str(error)
        pod.not_before = retry_at
