"""Answered probes as people see them: which are answered, with which verdict, and why not."""

from collections.abc import Callable, Iterator

import msgspec
from prometheus_client import core

from agent.admin.report import AnswerStatus
from agent.metrics import MetricFamily, labelled
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.probing.answered_probes import AnsweredProbes, CheckedVerdict
from agent.probing.answers import Obstacle, ProbeName
from probes.clock import boot_clock_ns

VERDICTS = MetricFamily(
    "podgate_verdicts",
    "gauge",
    "Verdicts in force, with which the relay answers probes of the kubelet, by result.",
    ("result",),
)
NOT_ANSWERED = MetricFamily(
    "podgate_probes_not_answered",
    "gauge",
    "Probes with answered: true that the relay does not answer now, by reason.",
    ("reason",),
)

_HEALTHY, _UNHEALTHY = "healthy", "unhealthy"


class AnswerReport:
    """Of all pods, as they are now."""

    def __init__(
        self,
        store: PodStore,
        answered: AnsweredProbes,
        problem_for: Callable[[PodState], str | None],
        *,
        now_ns: Callable[[], int] = boot_clock_ns,
    ) -> None:
        """problem_for: why the kubelet's connections to a pod bypass the relay, or None."""
        self._store = store
        self._answered = answered
        self._problem_for = problem_for
        self._now_ns = now_ns

    def of(self, state: PodState) -> dict[ProbeName, AnswerStatus]:
        """Of each probe that is to be answered."""
        plan = self._answered.plan(state.pod.uid)
        found = {
            name: AnswerStatus(obstacle=plan.obstacles[name].value, problem=problem)
            for name, problem in plan.problems.items()
        }
        problem = self._problem_for(state) if plan.requests else None
        for request in plan.requests:
            status = self._status(self._answered.verdict(state.pod.uid, request.id), problem)
            found |= {name: _named(name, status) for name in request.probes}
        return found

    def _status(self, verdict: CheckedVerdict | None, bypassed: str | None) -> AnswerStatus:
        if bypassed is not None:
            text = f"the kubelet's probe goes to the pod itself: {bypassed}"
            return AnswerStatus(obstacle=Obstacle.NOT_RELAYED, problem=text)
        if verdict is None:
            text = "the kubelet's probe is proxied: podgate's own has no result yet."
            return AnswerStatus(obstacle=Obstacle.NO_VERDICT, problem=text)
        now = self._now_ns()
        age = (now - verdict.finished_ns) / 1e9
        if not verdict.is_in_force(now):
            text = "the kubelet's probe is proxied: the last result of podgate's own has ended."
            return AnswerStatus(obstacle=Obstacle.STALE, problem=text, age_seconds=age)
        result = _HEALTHY if verdict.is_healthy else _UNHEALTHY
        return AnswerStatus(verdict=result, age_seconds=age)

    def collect(self) -> Iterator[core.Metric]:
        verdicts = {_HEALTHY: 0, _UNHEALTHY: 0}
        obstacles = {obstacle.value: 0 for obstacle in Obstacle}
        for state in self._store.states():
            for status in self.of(state).values():
                if status.obstacle:
                    obstacles[status.obstacle] += 1
                else:
                    verdicts[status.verdict] += 1
        yield labelled(VERDICTS, (((result,), count) for result, count in verdicts.items()))
        yield labelled(NOT_ANSWERED, (((reason,), n) for reason, n in obstacles.items()))


def _named(name: ProbeName, status: AnswerStatus) -> AnswerStatus:
    """With the probe's name in its sentence."""
    if not status.problem:
        return status
    return msgspec.structs.replace(status, problem=f"{name}: {status.problem}")
