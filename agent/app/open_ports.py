"""Declared ports that are open to host processes because the kubelet is not identified.

Gates cannot distinguish its probes then, and healthy pods would restart if they dropped them
(`may_be_kubelet` in bpf/src/rules.h). It is reported wherever a user may look: by readyz, doctor,
conditions, findings and the log; the metric is `KubeletAdmission`'s.
"""

import asyncio

import structlog

from agent.kubelet.admission import KubeletAdmission
from agent.kubelet.admitted_ports import kubelet_rules
from agent.kubelet.identity import KubeletIdentity
from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)


class OpenPorts:
    """Reports them, and marks pods whose conditions change with it. To be created on the loop."""

    def __init__(
        self,
        *,
        store: PodStore,
        kubelet: KubeletIdentity,
        admission: KubeletAdmission,
    ) -> None:
        self._store = store
        self._kubelet = kubelet
        self._admission = admission
        self._wake = asyncio.Event()
        self._changes = Subscription(self._wake)
        store.in_force.subscribe(self._changes)
        self._published = ""
        """The last explanation for which conditions were marked."""
        self._reported = ""

    @property
    def problem(self) -> str:
        """What is open, and why, in one sentence; empty if no pod's ports are."""
        explanation = self._explanation()
        is_any = explanation and any(map(_has_declared_ports, self._store.states()))
        return explanation if is_any else ""

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
        if before and not problem:
            log.info(Event.DECLARED_PORTS_CLOSED)
        elif problem != before:
            log.error(Event.DECLARED_PORTS_OPEN, reason=self._kubelet.problem)


def _has_declared_ports(state: PodState) -> bool:
    """Whether the gate of this pod drops, and admits the kubelet to any port."""
    return state.pod.mode >= Mode.ENFORCE and bool(kubelet_rules(state.pod.spec))
