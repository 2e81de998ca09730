"""Declared ports that are open to host processes because the kubelet is not identified.

Gates cannot distinguish its probes then, and healthy pods would restart if they dropped them
(`may_be_kubelet` in bpf/src/rules.h). It is reported wherever a user may look: by readyz, doctor,
conditions, an Event about the node, and the log; the metric is `KubeletAdmission`'s.
"""

import asyncio
import contextlib

import structlog

from agent.kubelet.admission import KubeletAdmission
from agent.kubelet.admitted_ports import kubelet_rules
from agent.kubelet.identity import KubeletIdentity
from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.events import PodEvent, PodEvents
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)

REASON = "KubeletNotIdentified"
"""Of the Event."""

# An Event exists for an hour, and one that is repeated within six minutes is counted.
_REPEAT_SECONDS = 300.0


class OpenPorts:
    """Reports them, and marks pods whose conditions change with it. To be created on the loop."""

    def __init__(
        self,
        *,
        store: PodStore,
        events: PodEvents,
        kubelet: KubeletIdentity,
        admission: KubeletAdmission,
    ) -> None:
        self._store = store
        self._events = events
        self._kubelet = kubelet
        self._admission = admission
        self._wake = asyncio.Event()
        self._changes = Subscription(self._wake)
        store.in_force.subscribe(self._changes)
        self._published = ""
        """The last explanation for which conditions were marked."""
        self._reported = ""
        self._repeat_at: float | None = None

    @property
    def problem(self) -> str:
        """What is open, and why, in one sentence; empty if no pod's ports are."""
        is_any = any(map(_has_declared_ports, self._store.states()))
        return self._explanation() if is_any else ""

    def problem_for(self, state: PodState) -> str:
        """As `problem`, for one pod."""
        return self._explanation() if _has_declared_ports(state) else ""

    def hint(self) -> None:
        """The kubelet may have been found, or lost."""
        self._wake.set()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            self._wake.clear()
            self._changes.take()
            self._mark_conditions()
            self._report()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._repeat_at):
                    await self._wake.wait()

    def _explanation(self) -> str:
        if self._admission.has_cgroup:
            return ""
        return (
            "Kubelet not identified, so host processes outside pods reach declared ports: "
            f"{self._kubelet.problem}"
        )

    def _mark_conditions(self) -> None:
        if self._explanation() != self._published:
            self._published = self._explanation()
            for state in self._store.states():
                self._store.in_force.mark(state.pod.uid)

    def _report(self) -> None:
        problem, before = self.problem, self._reported
        self._reported = problem
        if not problem:
            self._repeat_at = None
            if before:
                log.info(Event.DECLARED_PORTS_CLOSED)
            return
        if problem != before:
            log.error(Event.DECLARED_PORTS_OPEN, reason=self._kubelet.problem)
        now = asyncio.get_running_loop().time()
        if problem != before or self._repeat_at is None or now >= self._repeat_at:
            self._repeat_at = now + _REPEAT_SECONDS
            self._events.record(PodEvent(None, REASON, problem, action="Gating"))


def _has_declared_ports(state: PodState) -> bool:
    """Whether the gate of this pod drops, and admits the kubelet to any port."""
    return state.pod.mode >= Mode.ENFORCE and bool(kubelet_rules(state.pod.spec))
