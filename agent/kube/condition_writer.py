"""Conditions to the API server: what is true, once, and not more often than it helps anybody.

`set_pod` says what the API has, `enqueue` that what is known has changed; a pod whose two differ is
patched, with the newest at that moment, however much happened before. So nothing is sent at rest,
a foreign hand is corrected, and after an outage each pod that changed costs one PATCH.

* All pods together: a bucket, and while the API server is away one pod tries for all, less and less
  often.
* One pod: a small bucket, for probes that flap and for others who write the same conditions.
* What changes nobody's mind waits for more: while one condition of a pod that starts is False
  anyway, the others need not be told at once.
* Text alone (each failing probe says how long it took) goes once a minute.
* Conditions of sandboxes that are gone go first: they say Ready of a pod nobody has looked at.
"""

import asyncio
import random
from collections.abc import Callable, Iterable

import msgspec
import structlog

from agent import backoff
from agent.kube import objects, patches
from agent.kube.client import STRATEGIC_MERGE, ApiClient, ApiError
from agent.kube.objects import ApiPod
from agent.kube.patches import Difference, SandboxStamp
from agent.pods.conditions import TYPES, Condition

log = structlog.get_logger(__name__)

# The kubelet's own defaults for its requests (kubeAPIQPS, kubeAPIBurst).
_PATCHES_PER_SECOND = 50.0
_BURST = 100
_AT_ONCE = 8
_PER_POD_PER_SECOND = 0.1
_PER_POD_BURST = 4
_TEXT_SECONDS = 60.0
# Sandbox, gate, container and its first probe come one after the other; most pods start in this.
_SETTLE_SECONDS = 3.0
_PATCH_SECONDS = 10.0
_TICK_SECONDS = 0.001
_REFUSED_BASE_SECONDS, _REFUSED_CAP_SECONDS = 5.0, 300.0


class _PodWrites:
    """One pod in the API."""

    def __init__(self, actual: ApiPod, jitter: backoff.Jitter) -> None:
        self.actual = actual
        self.is_replaced = False
        self.is_in_flight = False
        self.text_at = 0.0
        """When a new text alone may be sent."""
        self.differs_since: float | None = None
        """Since when the API's conditions are not what they should be."""
        self.not_before = 0.0
        """When it may be tried again after a refusal."""
        self.rejection = ""
        """What the API server said against this pod's patch, when it did."""
        self.bucket = backoff.Bucket(per_second=_PER_POD_PER_SECOND, burst=_PER_POD_BURST)
        self.backoff = backoff.Backoff(
            base_seconds=_REFUSED_BASE_SECONDS, cap_seconds=_REFUSED_CAP_SECONDS, jitter=jitter
        )


class ConditionWriter:
    """Keeps the API's conditions of this node's pods true. To be used on the event loop."""

    def __init__(
        self,
        api: ApiClient,
        *,
        conditions_of: Callable[[str], Iterable[Condition]],
        sandbox_of: Callable[[str], str],
        boot: str,
        writes_all: bool = False,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """conditions_of: what is known of a pod, by uid; sandbox_of: the name of its sandbox, empty
        when it is not known; boot: the kernel's boot id; writes_all: also for pods without one of
        podgate's readiness gates.
        """
        self.patches = 0
        """How many were sent."""
        self.replaced = 0
        """How many of them met another pod, or none."""
        self.problem = ""
        """Why nothing can be written now; empty while all is well."""
        self._api = api
        self._conditions_of = conditions_of
        self._sandbox_of = sandbox_of
        self._boot = boot
        self._writes_all = writes_all
        self._jitter = jitter
        self._pods: dict[str, _PodWrites] = {}
        self._due: dict[str, float] = {}
        self._stale: set[str] = set()
        self._resume_at = 0.0
        self._in_flight = 0
        self._wake = asyncio.Event()
        self._bucket = backoff.Bucket(per_second=_PATCHES_PER_SECOND, burst=_BURST)
        self._backoff = backoff.Backoff(base_seconds=1.0, cap_seconds=30.0, jitter=jitter)

    @property
    def pending(self) -> int:
        """How many pods' conditions in the API are not what they should be."""
        return len(self._due) + self._in_flight

    def set_pod(self, actual: ApiPod) -> None:
        """The API has this version of a pod."""
        if not self._writes_all and actual.gates.isdisjoint(TYPES):
            return
        pod = self._pods.get(actual.uid)
        if pod is None or pod.actual.metadata.uid != actual.metadata.uid:
            self._pods[actual.uid] = _PodWrites(actual, self._jitter)
        elif objects.is_older(
            actual.metadata.resource_version, pod.actual.metadata.resource_version
        ):
            return
        else:
            pod.actual = actual
        self.enqueue(actual.uid)

    def enqueue(self, uid: str) -> None:
        """What is known of a pod may have changed: its conditions, or its sandbox."""
        pod = self._pods.get(uid)
        if pod is None or pod.is_replaced or pod.is_in_flight:
            return
        desired_conditions = self._desired(uid, pod)
        found = patches.difference(pod.actual, desired_conditions)
        self._stale.discard(uid)
        if found is Difference.NONE:
            self._due.pop(uid, None)
            pod.differs_since = None
            return
        now = asyncio.get_running_loop().time()
        if pod.differs_since is None:
            pod.differs_since = now
        due = max(now + pod.bucket.seconds_until_next(), pod.not_before)
        if found is Difference.TEXT:
            due = max(due, pod.text_at)
        stamp = SandboxStamp(self._sandbox_of(uid), self._boot)
        if any(self._is_stale(pod, kind, stamp) for kind in TYPES):
            self._stale.add(uid)
        elif not patches.changes_readiness(pod.actual, desired_conditions):
            due = max(due, pod.differs_since + _SETTLE_SECONDS)
        self._due[uid] = due
        self._wake.set()

    def enqueue_all(self) -> None:
        """What is known of any pod may have changed."""
        for uid in list(self._pods):
            self.enqueue(uid)

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._pods.pop(uid, None)
        self._due.pop(uid, None)
        self._stale.discard(uid)

    async def run(self) -> None:
        """Write until cancelled."""
        places = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while True:
                await places.acquire()
                await self._bucket.wait()
                uid, pod = await self._next()
                pod.is_in_flight = True
                self._in_flight += 1
                task = group.create_task(self._write(uid, pod), name=f"conditions of {uid}")
                task.add_done_callback(lambda done: places.release())

    async def _next(self) -> tuple[str, _PodWrites]:
        """Wait for the pod that is to be written next, and take it."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            now = loop.time()
            # A timer's rounding must not make this a busy loop.
            ready = [uid for uid, due in self._due.items() if due <= now + _TICK_SECONDS]
            # While nothing can be written, one pod tries for all.
            has_way = now + _TICK_SECONDS >= self._resume_at and not (
                self.problem and self._in_flight
            )
            if ready and has_way:
                uid = min(ready, key=lambda one: (one not in self._stale, self._due[one]))
                del self._due[uid]
                return uid, self._pods[uid]
            wait = None
            if self._due and (has_way or not self._in_flight):
                wait = max(min(self._due.values()), self._resume_at) - now
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _write(self, uid: str, pod: _PodWrites) -> None:
        conditions = self._desired(uid, pod)
        if patches.difference(pod.actual, conditions) is not Difference.NONE:
            pod.bucket.take()
            pod.differs_since = None
            self.patches += 1
            try:
                content = await self._api.request(
                    "PATCH",
                    patches.path(pod.actual),
                    body=patches.body(pod.actual, conditions),
                    content_type=STRATEGIC_MERGE,
                    timeout_seconds=_PATCH_SECONDS,
                )
            except ApiError as error:
                self._handle_error(error, pod)
            else:
                self._mark_healthy(pod)
                self._handle_response(content, pod, conditions)
        pod.is_in_flight = False
        self._in_flight -= 1
        self._wake.set()
        if self._pods.get(uid) is pod:
            self.enqueue(uid)

    def _desired(self, uid: str, pod: _PodWrites) -> tuple[objects.PodCondition, ...]:
        now = SandboxStamp(self._sandbox_of(uid), self._boot)
        return patches.desired_conditions(pod.actual, self._conditions_of(uid), now)

    def _is_stale(self, pod: _PodWrites, kind: str, now: SandboxStamp) -> bool:
        condition = pod.actual.condition(kind)
        return condition is not None and patches.is_stale(condition, now)

    def _handle_response(
        self, content: bytes, pod: _PodWrites, conditions: tuple[objects.PodCondition, ...]
    ) -> None:
        """Know at once what the API has now: the watch tells it later, and older things before."""
        try:
            answer = msgspec.json.decode(content, type=ApiPod)
        except msgspec.DecodeError as error:
            log.warning(
                "the API server's answer to a patch cannot be read",
                pod=pod.actual.metadata.full_name,
                error=str(error),
            )
            pod.not_before = asyncio.get_running_loop().time() + pod.backoff.next_seconds()
            return
        before = pod.actual.metadata.resource_version
        if not objects.is_older(answer.metadata.resource_version, before):
            pod.actual = answer

    def _mark_healthy(self, pod: _PodWrites) -> None:
        now = asyncio.get_running_loop().time()
        pod.text_at = now + _TEXT_SECONDS
        pod.backoff.reset()
        pod.rejection = ""
        self._backoff.reset()
        self._resume_at = 0.0
        if self.problem:
            log.info("conditions are written again", pending=len(self._due))
            self.problem = ""

    def _handle_error(self, error: ApiError, pod: _PodWrites) -> None:
        name = pod.actual.metadata.full_name
        now = asyncio.get_running_loop().time()
        if patches.is_pod_replaced(error):
            pod.is_replaced = True
            self.replaced += 1
            log.info("pod is gone from the API; its conditions are dropped", pod=name)
        elif error.is_transient:
            if not self.problem:
                log.warning(
                    "conditions cannot be written; each pod's newest will be",
                    error=str(error),
                    code=error.code,
                )
            self.problem = str(error)
            # Those that were under way together are one failure.
            if now + _TICK_SECONDS >= self._resume_at:
                delay = max(error.retry_after_seconds, self._backoff.next_seconds())
                self._resume_at = now + delay
        else:
            if pod.rejection != str(error):
                log.error(
                    "API server refuses a pod's conditions; see the agent's rights to patch "
                    "pods/status",
                    pod=name,
                    error=str(error),
                    code=error.code,
                )
            pod.rejection = str(error)
            pod.not_before = now + pod.backoff.next_seconds()
