"""Lets a roll-out of the DaemonSet continue at this node, where its controller lost its timer.

The controller deletes the previous pod once the new one has been ready for minReadySeconds. For
that it has one timer for a DaemonSet, whose earliest time wins (AddAfter in client-go,
util/workqueue/delaying_queue.go). A pod that became ready less than minReadySeconds before, of the
previous roll-out, has set one already: it fires too early for the new pod, and nothing sets another
while the previous pod is available, since the status considers only the oldest pod of a node
(updateDaemonSetStatus in pkg/controller/daemon/daemon_controller.go). That happens where one
roll-out follows another at once: after an API server that hung, pods are available as soon as they
are reported ready. The controller reconciles at any change of a pod, so the agent writes a
condition of its own pod.
"""

import asyncio
import datetime
import random
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from agent import backoff
from agent.kube import patches
from agent.kube.client import STRATEGIC_MERGE, ApiClient, ApiError
from agent.kube.objects import ApiPod, PodCondition
from agent.labels import DOMAIN
from agent.logs import Event
from agent.pods.conditions import TRUE

log = structlog.get_logger(__name__)

TYPE: Final = f"{DOMAIN}/took-over"
REASON: Final = "PreviousPodRuns"
FIRST_SECONDS: Final = 33.0
"""After the pod became ready: the chart's minReadySeconds, the second that the controller adds, and
two in which it deletes the pod itself."""
LONGEST_SECONDS: Final = 300.0
"""Between two writes of a roll-out that waits for another reason, or that has a higher
minReadySeconds."""

_POLL_SECONDS: Final = 2.0
_PATCH_SECONDS: Final = 10.0
_NAME: Final = "app.kubernetes.io/name"
_REVISION: Final = "controller-revision-hash"


class RollOut:
    """The roll-out of this agent's own DaemonSet, as far as this node is concerned."""

    def __init__(
        self,
        api: ApiClient,
        pods: Callable[[], Iterable[ApiPod]],
        *,
        namespace: str,
        name: str,
        jitter: backoff.Jitter = random.random,
        now: Callable[[], datetime.datetime] | None = None,
    ) -> None:
        """pods: of this node, as the API server has them; namespace, name: of this agent's pod;
        now: the wall clock, in UTC."""
        self._api = api
        self._pods = pods
        self._namespace = namespace
        self._name = name
        self._now = now or (lambda: datetime.datetime.now(datetime.UTC))
        self._backoff = backoff.Backoff(base_seconds=5.0, cap_seconds=60.0, jitter=jitter)
        self._since = ""
        """When the pod became ready, as the API has it."""
        self._seconds = FIRST_SECONDS
        """How long it has to be ready for the next write."""

    async def run(self) -> None:
        """Write where it does not continue, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            found = self._waiting()
            if found is None:
                continue
            own, previous = found
            try:
                await self._write(own, previous)
            except ApiError as error:
                if not self._backoff.failures:
                    log.warning(Event.ROLL_OUT_NOT_REMINDED, error=str(error), code=error.code)
                await asyncio.sleep(max(error.retry_after_seconds, self._backoff.next_seconds()))
            else:
                self._backoff.reset()
                self._seconds += min(self._seconds, LONGEST_SECONDS)

    def _waiting(self) -> tuple[ApiPod, ApiPod] | None:
        """This agent's pod, and the previous one that should be deleted by now."""
        pods = [pod for pod in self._pods() if pod.metadata.namespace == self._namespace]
        own = next((pod for pod in pods if pod.metadata.name == self._name), None)
        ready = own.condition("Ready") if own else None
        if own is None or ready is None or ready.status != TRUE or not ready.last_transition_time:
            return None
        if ready.last_transition_time != self._since:
            self._since, self._seconds = ready.last_transition_time, FIRST_SECONDS
        since = datetime.datetime.fromisoformat(self._since)
        if (self._now() - since).total_seconds() < self._seconds:
            return None
        previous = next((pod for pod in pods if _precedes(pod, own)), None)
        return (own, previous) if previous else None

    async def _write(self, own: ApiPod, previous: ApiPod) -> None:
        before = own.condition(TYPE)
        at = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = PodCondition(
            type=TYPE,
            status=TRUE,
            reason=REASON,
            # Each write has another text, or it would change nothing.
            message=f"This agent has the node, and its pod has been ready since {self._since}; "
            f"the previous pod {previous.metadata.name} still runs. Written at {at}, so that the "
            "DaemonSet controller reconciles again.",
            last_transition_time=(before and before.last_transition_time) or at,
        )
        await self._api.request(
            "PATCH",
            patches.path(own),
            body=patches.body(own, [condition]),
            content_type=STRATEGIC_MERGE,
            timeout_seconds=_PATCH_SECONDS,
        )
        log.info(Event.ROLL_OUT_REMINDED, previous=previous.metadata.full_name)


def _precedes(pod: ApiPod, own: ApiPod) -> bool:
    """Whether it is of the same DaemonSet, of another revision, older, and not being deleted."""
    labels, of_own = pod.metadata.labels, own.metadata.labels
    return (
        pod.metadata.deletion_timestamp is None
        and labels.get(_NAME) == of_own.get(_NAME)
        and labels.get(_REVISION) not in (None, of_own.get(_REVISION))
        # RFC 3339 in UTC and whole seconds, so the order of the texts is that of the times.
        and (pod.metadata.creation_timestamp or "9") < (own.metadata.creation_timestamp or "")
    )
